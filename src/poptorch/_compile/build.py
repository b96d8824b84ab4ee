"""Micro graph and update pieces -> Program: which loops, and what is fused with what."""

from __future__ import annotations

from collections.abc import Mapping

from .. import _update
from .._ir.graph import Graph, compose
from .._ir.optim_spec import OptimSpec
from .._ir.program import Axis, Emit, Node, Program, Repeat, Run
from .._ir.slot import Kind, Slot
from .._ir.spec import Spec
from .anchors import emitted_anchors, with_updated_weights
from .lower import lower


def inference_program(micro: Graph, spec: Spec) -> Program:
    """Return ``repeat iterations { repeat replicas { forward } }; emit``."""
    forward = Graph("forward", micro.module, micro.inputs, micro.outputs)
    body = _repeat(Axis.REPLICAS, spec.loops.replicas, (Run("forward"),))
    body = _repeat(Axis.ITERATIONS, spec.loops.iterations, body)
    graphs = {"forward": forward}
    return Program((*body, _emit(micro, graphs, spec)), graphs, spec.loops, {})


def training_program(micro: Graph, spec: Spec, optim: OptimSpec) -> Program:
    """Return the training step.

    With one micro-batch per update forward, backward and update are one graph; otherwise the micro
    step adds its gradients to accumulators that the update empties.
    """
    loops = spec.loops
    gradients = [slot for slot in micro.outputs if slot.kind is Kind.GRADIENT]
    params = [slot for slot in micro.inputs if slot.kind is Kind.PARAM]
    trained = {slot.path for slot in gradients}
    updated = [slot for slot in params if slot.path in trained]
    tally = _update.Tally(chunks=loops.accumulation * loops.replicas, replicas=loops.replicas)
    if tally.chunks == 1:
        return _fused(micro, spec, optim, gradients, updated, tally)
    accumulate = lower(_update.accumulate(optim, gradients, spec.reduction, tally))
    last = _update.finish(optim, gradients, spec.reduction, tally)
    finish = lower(last)
    update, initial = _update_graph(optim, updated, finish)
    graphs = {
        "micro": compose("micro", [micro, accumulate]),
        "update": compose("update", [finish, update]),
    }
    body = _repeat(Axis.REPLICAS, loops.replicas, (Run("micro"),))
    body = _repeat(Axis.ACCUMULATION, loops.accumulation, body)
    return _training(graphs, (*body, Run("update")), micro, spec, {**last.initial, **initial})


def _fused(
    micro: Graph,
    spec: Spec,
    optim: OptimSpec,
    gradients: list[Slot],
    updated: list[Slot],
    tally: _update.Tally,
) -> Program:
    parts = [micro]
    scale = _update.scale(optim, gradients, spec.reduction, tally)
    before: Mapping[str, float] = {}
    if scale is not None:
        parts.append(lower(scale))
        before = scale.initial
    update, initial = _update_graph(optim, updated, parts[-1])
    graphs = {"step": compose("step", [*parts, update])}
    return _training(graphs, (Run("step"),), micro, spec, {**before, **initial})


def _update_graph(
    optim: OptimSpec, updated: list[Slot], source: Graph
) -> tuple[Graph, Mapping[str, float]]:
    dtypes = {slot.dtype for slot in source.outputs if slot.kind is Kind.GRADIENT}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    piece = _update.lower(optim, updated, gradient_dtype=dtype)
    return lower(piece), piece.initial


def _training(
    graphs: Mapping[str, Graph],
    update: tuple[Node, ...],
    micro: Graph,
    spec: Spec,
    initial: Mapping[str, float],
) -> Program:
    body = _repeat(Axis.ITERATIONS, spec.loops.iterations, update)
    graphs = {name: with_updated_weights(graph, spec) for name, graph in graphs.items()}
    return Program((*body, _emit(micro, graphs, spec)), graphs, spec.loops, initial)


def _repeat(axis: Axis, count: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
    return body if count == 1 else (Repeat(axis, count, body),)


def _emit(micro: Graph, graphs: Mapping[str, Graph], spec: Spec) -> Emit:
    slots = tuple(slot for slot in micro.outputs if slot.kind in (Kind.LOSS, Kind.OUTPUT))
    anchors, exceptions = emitted_anchors(graphs, spec)
    return Emit((*slots, *anchors), spec.output.mode, spec.output.period, exceptions)
