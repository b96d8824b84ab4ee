"""The spine: the rooms in order, one call each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .. import _capture, _place, backends
from .._base import log, trees
from .._base.errors import Error
from .._ir import verify
from .._ir.graph import Graph
from .._ir.layout import Layout
from .._ir.optim_spec import OptimSpec
from .._ir.plan import Plan
from .._ir.program import LaneAxis, Program
from .._ir.slot import Kind
from .._ir.spec import Spec
from . import cache, lanes
from .build import inference_program, training_program
from .export import export
from .overlap import check_overlap
from .staged import stage, step_graphs
from .tiers import compile_plan


@dataclass(frozen=True, eq=False)
class Compiled:
    """What the session keeps of a compilation.

    Attributes:
        plan: the program and its placement.
        executable: the backend's result.
        constants: first values of ``constant.*`` state.
        outputs: the structure that forward returned.
        names: of the tensors that can be anchored.
        host_outputs: returned tensors that forward did not compute, by their place among all.
    """

    plan: Plan
    executable: backends.Executable
    constants: Mapping[str, torch.Tensor]
    outputs: trees.Structure
    host_outputs: Mapping[int, torch.Tensor]
    names: tuple[str, ...]

    def changed_inputs(self) -> list[int]:
        """Return the positions of the inputs that forward changes in place."""
        graphs = self.plan.program.graphs.values()
        return [s.index for graph in graphs for s in graph.outputs if s.kind is Kind.BATCH]


@_capture.forgetting_sources()
def compile(
    request: _capture.Request,
    spec: Spec,
    optim: OptimSpec | None,
    progress: Callable[[float], None],
    placed: Callable[[int], None] = lambda count: None,
    background: bool = False,
) -> Compiled:
    """Capture, build, place and compile one wrapped model.

    Args:
        request: what is captured.
        spec: every setting.
        optim: the optimizer's structure; None in inference.
        progress: told the share of the work done, from 0 to 1.
        placed: told how many chips all replicas reserve before the backend starts.
        background: return before optimised code is there, if the backend is left to the library.
    """
    verify.verify_spec(spec)
    backend = backends.choose(spec.target.backend)
    if spec.precision.floating_point_exceptions:
        backend = backends.checking(backend)
    progress(0.02)
    by_stages = backends.works_by_stages(backend)
    micro, lane_axis, layout = _captured(request, spec, by_stages)
    if micro.overlaps:
        check_overlap(spec)
    _place.log_layout(layout, spec)
    progress(0.2)
    if optim is None:
        program = inference_program(micro.graph, spec, lane_axis)
    else:
        program = training_program(micro.graph, spec, optim, lane_axis, bundles=not by_stages)
    plan = Plan(program, spec, layout)
    if by_stages:
        plan = _cut(plan, micro.graph, layout, optim)
    verify.verify_plan(plan)
    _check_broadcast(request, program, spec)
    placed(layout.reserved)
    progress(0.3)
    log.engine.debug("Program:\n%s", program)
    export(plan)
    executable = cache.compile_or_find(
        backend.name,
        plan,
        request.arguments,
        spec.runtime.cache_dir,
        lambda store: compile_plan(
            backend,
            plan,
            store,
            background and spec.target.backend == backends.AUTO,
            lambda share: progress(0.3 + 0.7 * share),
        ),
    )
    return Compiled(
        plan, executable, micro.constants, micro.outputs, micro.host_outputs, micro.names
    )


def _captured(
    request: _capture.Request, spec: Spec, single: bool
) -> tuple[_capture.Micro, LaneAxis | None, Layout]:
    """Capture and place: micro-batches side by side, or a single one.

    Returns:
        What was captured, the labelled graph in it; what its lanes are; and where it runs.
    """
    if spec.training and spec.hint("autoRecomputation") and not single:
        request = dataclasses.replace(request, recompute=True)  # stages see to it themselves
    micro, axis = (_capture.capture(request), None) if single else lanes.capture(request, spec)
    layout = _place.place(micro.graph, micro.visits, spec)
    assert layout.graph is not None
    return dataclasses.replace(micro, graph=layout.graph), axis, layout


def _cut(plan: Plan, graph: Graph, layout: Layout, optim: OptimSpec | None) -> Plan:
    step = step_graphs(graph, plan.spec, optim, plan.program)
    return dataclasses.replace(plan, layout=layout, staged=stage(step, layout, plan.spec))


@_capture.forgetting_sources()
def with_stages(plan: Plan, request: _capture.Request, optim: OptimSpec | None) -> Plan:
    """Return a plan that also holds its staged form, for one micro-batch at a time.

    Stages are cut from the graph of one micro-batch. If the plan's runs several side by side, or
    was read from a file, that is captured and placed now, as a compilation does it.
    """
    layout = plan.layout
    if layout.graph is None or plan.program.lanes is not None:
        micro, _, layout = _captured(request, plan.spec, single=True)
        return _cut(plan, micro.graph, layout, optim)
    return _cut(plan, layout.graph, layout, optim)


def _check_broadcast(request: _capture.Request, program: Program, spec: Spec) -> None:
    """Replicas that read different inputs cannot agree on a buffer that forward changes.

    Raises:
        Error: one is changed while buffers are broadcast; batch norm's statistics are exempt.
    """
    if spec.loops.input_groups == 1 or not spec.broadcast_buffers:
        return
    changed = {
        slot.path
        for graph in program.graphs.values()
        for slot in graph.outputs
        if slot.kind is Kind.BUFFER and slot.key in graph.updates
    }
    for path, tied in request.tensors.items():
        if path in changed and not tied.is_statistic:
            raise Error(
                "PopTorch does not support broadcasting buffers that the model changes",
                got=f"buffer '{path}' with {spec.loops.replicas} replicas",
                fix="options.broadcastBuffers(False): every replica keeps a value of its own",
            )
