"""Compile a model: run the passes, choose the backend, and let it compile the plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import _capture, backends
from .._base import env, log, safe_files, timing
from .._base.errors import Error
from .._base.resources import collecting_rarely
from .._base.thread_safety import one_at_a_time
from .._eager import EagerOptimizer
from .._ir import graph_json, indices, verify
from .._ir.conditions import Conditions
from .._ir.plan import Plan
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from . import agreement, cache, passes, registry, size_proof
from .compilation import Compilation
from .eager_check_policy import EagerCheck
from .remainder import Remainder
from .size_proof import EarlierProgram
from .tiers import compile_plan, prepare


@dataclass(frozen=True, eq=False)
class CompiledModel:
    plan: Plan  # the program and its placement
    executable: backends.Executable  # made by the backend
    micro: _capture.Micro  # a single micro-batch, as it was captured
    conditions: Conditions | None  # conditions on symbolic sizes, including those of lanes

    @property
    def device(self) -> torch.device:
        return backends.device_of(self.executable)

    def changed_inputs(self) -> list[int]:
        return [slot.index for slot in self._written() if slot.kind is Kind.BATCH]

    def changed_buffers(self) -> list[str]:
        """Return the paths of the buffers that forward changes."""
        return [slot.path for slot in self._written() if slot.kind is Kind.BUFFER]

    def _written(self) -> Iterator[Slot]:
        return (slot for graph in self.plan.program.graphs.values() for slot in graph.outputs)

    def ranges(self) -> tuple[indices.IndexRange, ...]:
        program, checked = self.plan.program, self.plan.spec.precision.check_indices
        return indices.ranges(list(program.graphs.values())) if checked else ()

    def preconditions(self) -> list[indices.IndexRange]:
        known = indices.preconditions(self.plan.program.graphs, checked=True).values()
        return [each for every in known if every is not None for each in every]


def wrapped(backend: str, cache_dir: str | None) -> None:
    """Let an idle core import the compiler from now on, while the script prepares its data."""
    if backend in (backends.AUTO, backends.OPTIMISE):
        best = registry.available()[registry.BEST]
        if best.unavailable() is None:  # otherwise, compiling reports it
            prepare(best, cache.store_of(cache_dir))


@one_at_a_time()
@collecting_rarely()
@timing.measured()
@_capture.forgetting_sources()
def compile(
    request: _capture.Request,
    spec: Spec,
    optim: OptimSpec | None,
    progress: Callable[[float], None],
    placed: Callable[[int], None],
    background: bool,
    more_facts: Mapping[str, str],
    eager_optimizer: EagerOptimizer | None = None,
    remainder: Remainder | None = None,
    earlier: EarlierProgram | None = None,
) -> CompiledModel:
    verify.verify_spec(spec)
    backend = registry.choose(spec.target.backend)
    if spec.precision.floating_point_exceptions:
        backend = registry.checking(backend)
    left_to_us = spec.target.backend in (backends.AUTO, backends.OPTIMISE)
    idle = prepare(backend, cache.store_of(spec.runtime.cache_dir)) if left_to_us else 0
    if spec.runs_together:
        agreement.meet(spec)
        spec = agreement.with_common(spec)
    progress(0.02)
    store, facts = cache.store_of(spec.runtime.cache_dir), None
    mode = "off" if spec.target.synthetic_data else spec.runtime.check
    check = EagerCheck(request, mode, store)
    compilation = passes.run(
        Compilation(
            request,
            spec,
            optim,
            registry.works_by_stages(backend),
            check,
            eager_optimizer,
            remainder,
            lambda part: EagerCheck(part, mode, store),
            earlier,
        ),
        progress=lambda share: progress(0.02 + 0.28 * share),
    )
    plan, micro = compilation.plan(), compilation.micro
    placed(plan.layout.reserved)
    log.engine.debug("Program:\n%s", plan.program)
    _export(plan)
    if spec.loops.processes > 1 and micro.exchanging:
        if spec.target.parts > 1:
            raise Error(
                "Replicas whose stages are on several processes cannot exchange tensors in forward",
                got=f"Distributed.stageProcesses({spec.target.parts}) and a collective custom_op",
                fix="let each process run all stages: options.Distributed.stageProcesses(1)",
            )
        # The order of exchanges must always be that of the graph, in every process.
        agreement.meet(spec)
        backend = registry.choose("reference")
    if spec.runs_together:
        agreement.check_processes_agree(plan, backend.name, request.arguments, more_facts)
    if spec.runtime.cache_dir is not None:
        facts = cache.facts_of(plan, backend.name, request.arguments)
        cache.log_hit_or_miss(store.folder, facts)
    executable = compile_plan(
        backend,
        plan,
        store,
        background and spec.target.backend == backends.AUTO,
        lambda share: progress(0.3 + 0.7 * share),
        idle,
    )
    if facts is not None:
        store.note(facts)
    return CompiledModel(plan, executable, micro, compilation.batched.micro.conditions)


@one_at_a_time()
@_capture.forgetting_sources()
def with_stages(
    plan: Plan, micro: _capture.Micro, request: _capture.Request, optim: OptimSpec | None
) -> Plan:
    """Return a plan that also contains its stages, for one micro-batch at a time.

    Stages of a plan for all sizes are those for the sizes of the request.
    """
    unchecked = EagerCheck.off(request)
    one = size_proof.micro_for_one_size(micro, request.batch)
    compilation = Compilation(request, plan.spec, optim, True, unchecked, micro=one)
    if plan.program.lanes is None and one is micro:
        compilation = compilation.having("layout", plan.layout)
    made = passes.run(compilation, stop="schedule")
    return dataclasses.replace(plan, layout=made.layout, staged=made.staged)


def _export(plan: Plan) -> None:
    """Write a plan as text, or with POPTORCH_EXPORT_PROTO_AS_BINARY as JSON."""
    name = env.get("POPTORCH_EXPORT_PROTO_FILE")
    if not name:
        return
    path = Path(name)
    if path.is_dir():
        path = path / "model.proto"
    path.parent.mkdir(parents=True, exist_ok=True)
    as_json = env.get("POPTORCH_EXPORT_PROTO_AS_BINARY")
    text = json.dumps(graph_json.encode(plan)) if as_json else plan.describe() + "\n"
    safe_files.write_text_for_user(path, text)
    log.engine.info("From POPTORCH_EXPORT_PROTO_FILE environment variable: wrote %s", path)
