"""Micro graph and the update -> Program: which loops, what is fused with what, what comes back."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import _place, _update
from .._base.errors import Error
from .._ir import slots
from .._ir.bundle import BUCKET, Bundle, Member, in_chunks, laid_out
from .._ir.graph import Graph, SlotFunction, compose, graph_module
from .._ir.loops import Lanes, Loops
from .._ir.program import Axis, Emit, Gather, Node, Program, Reduce, Repeat, Run, Scatter, Shard
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from ..enums import OutputMode, ReductionType
from .lower import lower


def inference_program(micro: Graph, spec: Spec, lanes: Lanes | None) -> Program:
    """Return ``repeat iterations { repeat replicas { forward } }; emit``, or chunks of lanes."""
    forward = Graph("forward", micro.module, micro.inputs, micro.outputs)
    body = _window(Run("forward"), Axis.ITERATIONS, spec.loops.iterations, spec.loops, lanes)
    graphs = {"forward": forward}
    return Program((*body, _emit(micro, graphs, spec)), graphs, spec.loops, {}, lanes)


@dataclass(frozen=True)
class _Trained:
    """What is trained, and how its gradients meet."""

    gradients: list[Slot]  # what a micro step makes
    own: list[Slot]  # those that the update sees: of parts, where processes update parts
    updated: list[Slot]  # the weights that it changes, or parts of them
    parts: frozenset[str]  # those of them that are parts
    batches: _update.MicroBatches  # the micro-batches of an update


def training_program(
    micro: Graph,
    spec: Spec,
    optim: OptimSpec,
    lanes: Lanes | None,
    bundles: tuple[Bundle, ...] = (),
    shards: tuple[Shard, ...] = (),
    early: bool = False,
) -> Program:
    """Return the training step.

    With one run per update forward, backward and update are one graph; otherwise the micro step
    adds its gradients to accumulators that the update empties. Where processes train together they
    add them up before the update; between machines, where a reduction takes long, those that are
    there early while the others are computed.
    """
    loops = spec.loops
    side_by_side = lanes.count if lanes is not None else 1
    runs = loops.accumulation * loops.replicas // side_by_side
    batches = _update.MicroBatches(
        lanes=side_by_side, chunks=runs, summed=loops.processes, replicas=loops.all_replicas
    )
    trained = _trained(micro, shards, batches)
    gather = (Gather(loops.processes, shards),) if shards else ()
    body: tuple[Node, ...]
    if runs > 1:
        graphs, initial = _separate(micro, spec, optim, trained)
        window = _window(Run("micro"), Axis.ACCUMULATION, loops.accumulation, loops, lanes)
        reduce = reduction(graphs["micro"], spec, shards)
        body = (*window, *reduce, *_measuring(graphs, spec), Run("update"), *gather)
    elif loops.processes > 1:
        pays = early and not shards and spec.target.hosts > 1
        parts = (_place.early(micro) if pays else None) or (micro,)
        graphs, initial = _apart(parts, spec, optim, trained)
        made = _reduced([graphs[name] for name in _MADE[: len(parts)]], spec, shards)
        body = (*made, *_measuring(graphs, spec), Run("update"), *gather)
    else:
        graphs, initial = _fused(micro, spec, optim, trained)
        body = (Run("step"),)
    body = _repeat(Axis.ITERATIONS, loops.iterations, body)
    graphs = {name: with_updated_weights(graph, spec) for name, graph in graphs.items()}
    return Program((*body, _emit(micro, graphs, spec)), graphs, loops, initial, lanes, bundles)


def _trained(micro: Graph, shards: Sequence[Shard], batches: _update.MicroBatches) -> _Trained:
    parts = _parts_of(shards)
    gradients = [slot for slot in micro.outputs if slot.kind is Kind.GRADIENT]
    paths = {slot.path for slot in gradients}
    weights = [s for s in micro.inputs if s.kind is Kind.PARAM and s.path in paths]
    return _Trained(
        gradients,
        _in_parts(gradients, parts),
        _in_parts(weights, parts),
        frozenset(part.path for part in parts.values()),
        batches,
    )


def _parts_of(shards: Sequence[Shard]) -> dict[str, Slot]:
    """Return by weight the part that a process updates, of it and of others."""
    return {member.slot.weight: each.part for each in shards for member in each.whole.members}


def _in_parts(tensors: Sequence[Slot], parts: Mapping[str, Slot]) -> list[Slot]:
    """Return what a process sees of tensors that belong to weights, each once."""
    seen = (slot.of(parts[slot.weight]) if slot.weight in parts else slot for slot in tensors)
    return list(dict.fromkeys(seen))


def _window(
    run: Run, axis: Axis, count: int, loops: Loops, lanes: Lanes | None
) -> tuple[Node, ...]:
    if lanes is not None:
        return _repeat(Axis.CHUNKS, count // lanes.steps, (run,))
    return _repeat(axis, count, _repeat(Axis.REPLICAS, loops.replicas, (run,)))


def _separate(
    micro: Graph, spec: Spec, optim: OptimSpec, trained: _Trained
) -> tuple[dict[str, Graph], Mapping[str, float]]:
    stochastic, batches = spec.precision.stochastic_rounding, trained.batches
    add = _update.accumulate(optim, trained.gradients, spec.reduction, batches)

    def descaling(gradients: Sequence[Slot]) -> list[SlotFunction]:
        return [_update.finish(optim, gradients, spec.reduction, batches)]

    ending, initial = _ending(spec, optim, trained, descaling)
    return {"micro": compose("micro", [micro, lower(add, stochastic)]), **ending}, initial


_MADE = ("gradients", "gradients left")


def _apart(
    parts: Sequence[Graph], spec: Spec, optim: OptimSpec, trained: _Trained
) -> tuple[dict[str, Graph], Mapping[str, float]]:
    """One run per update, whole or in two parts, whose gradients other processes add theirs to."""

    def descaling(gradients: Sequence[Slot]) -> list[SlotFunction]:
        scale = _update.scale(optim, gradients, spec.reduction, trained.batches)
        return [_update.take_back(gradients), *([scale] if scale is not None else [])]

    made = {}
    for name, part in zip(_MADE, parts, strict=False):
        gradients = [slot for slot in part.outputs if slot.kind is Kind.GRADIENT]
        made[name] = compose(name, [part, lower(_update.hand_over(gradients))])
    ending, initial = _ending(spec, optim, trained, descaling)
    return {**made, **ending}, initial


def _reduced(graphs: Sequence[Graph], spec: Spec, shards: Sequence[Shard]) -> Iterator[Node]:
    """Yield runs that make gradients, each with what adds them up; only the last one waits."""
    begun = 0
    for graph in graphs:
        yield Run(graph.name)
        for node in reduction(graph, spec, shards, begun):
            if isinstance(node, Reduce):
                begun += len(node.buckets)
                yield replace(node, waits=graph is graphs[-1])
            else:
                yield node


def _ending(
    spec: Spec,
    optim: OptimSpec,
    trained: _Trained,
    descaling: Callable[[Sequence[Slot]], list[SlotFunction]],
) -> tuple[dict[str, Graph], Mapping[str, float]]:
    """Return what follows when all gradients are added up, and the first values of its state."""
    functions = descaling(trained.own)
    before = [lower(each) for each in functions]
    update, initial = update_graph(optim, trained.updated, before[-1], spec, trained.parts)
    graphs = {"update": compose("update", [*before, update])}
    of_parts = [slot for slot in trained.own if slot.weight in trained.parts]
    if of_parts:
        parts = [slot for slot in trained.updated if slot.path in trained.parts]
        first = [lower(each) for each in descaling(of_parts)]
        own = _update.own_squares(optim, parts, gradient_dtype(before[-1]), trained.parts)
        if own is not None:
            emptied = {slot.key for graph in first for slot in graph.outputs}
            graphs["squares"] = compose("squares", [*first, lower(own)], drop=emptied)
    values = [function.initial for function in functions] + [initial]
    return graphs, {key: value for each in values for key, value in each.items()}


def _measuring(graphs: Mapping[str, Graph], spec: Spec) -> tuple[Node, ...]:
    """Return what adds squares of parts of weights up, if the update needs the whole sums."""
    if "squares" not in graphs:
        return ()
    (slot,) = graphs["squares"].outputs
    bucket = Bundle(slots.exchanged(-1, slot.numel, slot.dtype), (Member(slot, 0),))
    return Run("squares"), Reduce("squares", "sum", spec.loops.processes, (bucket,))


def reduction(
    graph: Graph, spec: Spec, shards: Sequence[Shard] = (), first: int = 0
) -> tuple[Node, ...]:
    """Return what adds the accumulators that a graph writes up over the processes, if several."""
    processes = spec.loops.processes
    written = [slot for slot in graph.outputs if slot.kind is Kind.ACCUM]
    if processes == 1 or not written:
        return ()
    operation = "mean" if spec.reduction.type == ReductionType.Mean else "sum"
    wholes = {m.slot.weight: shard for shard in shards for m in shard.whole.members}
    pairs = dict.fromkeys(
        (slot.of(wholes[slot.weight].whole.slot), slot.of(wholes[slot.weight].part))
        for slot in written
        if slot.weight in wholes
    )
    scatter = (Scatter(operation, processes, tuple(pairs)),) if pairs else ()
    accums = [slot for slot in written if slot.weight not in wholes]
    buckets = _buckets(accums, BUCKET * processes, first)
    reduce = (Reduce(Kind.ACCUM, operation, processes, buckets),) if buckets else ()
    return (*scatter, *reduce)


def _buckets(accums: Sequence[Slot], most: int, first: int = 0) -> tuple[Bundle, ...]:
    """Return accumulators in flat tensors of so many bytes at most, each of one type."""
    dtypes = dict.fromkeys(slot.dtype for slot in accums)
    of_types = [[slot for slot in accums if slot.dtype == dtype] for dtype in dtypes]
    chunks = [chunk for same in of_types for chunk in in_chunks(same, most)]
    buckets = []
    for index, chunk in enumerate(chunks, first):
        members, size = laid_out(chunk)
        buckets.append(Bundle(slots.exchanged(index, size, chunk[0].dtype), members))
    return tuple(buckets)


def _fused(
    micro: Graph, spec: Spec, optim: OptimSpec, trained: _Trained
) -> tuple[dict[str, Graph], Mapping[str, float]]:
    parts = [micro]
    scale = _update.scale(optim, trained.gradients, spec.reduction, trained.batches)
    before: Mapping[str, float] = {}
    if scale is not None:
        parts.append(lower(scale))
        before = scale.initial
    update, initial = update_graph(optim, trained.updated, parts[-1], spec)
    return {"step": compose("step", [*parts, update])}, {**before, **initial}


def update_graph(
    optim: OptimSpec,
    updated: list[Slot],
    source: Graph,
    spec: Spec,
    in_parts: frozenset[str] = frozenset(),
) -> tuple[Graph, Mapping[str, float]]:
    """Return one optimizer step for the gradients that a graph writes, and its first values."""
    rounding = spec.precision.stochastic_rounding
    named = [short for short, long, *_ in spec.anchors if long == slots.NORM]
    norms = [slots.anchor(short, (), torch.float32) for short in named]
    step = _update.lower(optim, updated, gradient_dtype(source), rounding, in_parts, norms)
    return lower(step), step.initial


def gradient_dtype(source: Graph) -> torch.dtype | None:
    """Return the type of all gradients that a graph writes; None if they differ."""
    dtypes = {slot.dtype for slot in source.outputs if slot.kind is Kind.GRADIENT}
    return dtypes.pop() if len(dtypes) == 1 else None


def _repeat(axis: Axis, count: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
    return body if count == 1 else (Repeat(axis, count, body),)


def emit(micro: Graph, spec: Spec) -> Emit:
    """Return what goes back to the host of a micro graph, without anchored weights."""
    kinds = (Kind.LOSS, Kind.OUTPUT, Kind.ANCHOR)
    results = tuple(slot for slot in micro.outputs if slot.kind in kinds)
    return Emit(results, spec.output.mode, spec.output.period)


def _emit(micro: Graph, graphs: Mapping[str, Graph], spec: Spec) -> Emit:
    results = tuple(slot for slot in micro.outputs if slot.kind in (Kind.LOSS, Kind.OUTPUT))
    anchors, exceptions = emitted_anchors(graphs, spec)
    return Emit((*results, *anchors), spec.output.mode, spec.output.period, exceptions)


UPDATED = "UpdatedVar___"
Exceptions = tuple[tuple[str, OutputMode, int], ...]


def with_updated_weights(graph: Graph, spec: Spec) -> Graph:
    """Return the graph with ``UpdatedVar___<weight>`` among its results where it is anchored."""
    written = {
        f"{UPDATED}{slot.path}": at
        for at, slot in enumerate(graph.outputs)
        if slot.kind is Kind.PARAM
    }
    wanted = [(short, written[long]) for short, long, *_ in spec.anchors if long in written]
    if not wanted:
        return graph
    copied = graph.copy()
    (output,) = (node for node in copied.module.graph.nodes if node.op == "output")
    returned = copied.returned
    output.args = ((*returned, *(returned[at] for _, at in wanted)),)
    weights = ((short, graph.outputs[at]) for short, at in wanted)
    anchored = [slots.anchor(short, weight.shape, weight.dtype) for short, weight in weights]
    module = graph_module(copied.module, copied.module.graph)
    return Graph(graph.name, module, graph.inputs, (*graph.outputs, *anchored))


def emitted_anchors(graphs: Mapping[str, Graph], spec: Spec) -> tuple[tuple[Slot, ...], Exceptions]:
    """Return the slots of all anchors, in the user's order, and how each comes back."""
    anchored = {
        slot.path: slot
        for graph in graphs.values()
        for slot in graph.outputs
        if slot.kind is Kind.ANCHOR
    }
    for short, long, *_ in spec.anchors:
        if short not in anchored:
            close = difflib.get_close_matches(long, _known(graphs), n=3)
            raise Error(
                f"No tensor with name {long} to anchor",
                got=f"anchorTensor({short!r}, {long!r})",
                fix=f"did you mean {' or '.join(close)}?"
                if close
                else "getTensorNames() of a compiled model lists the names",
            )
    slots = tuple(anchored[short] for short, *_ in spec.anchors)
    return slots, tuple(
        (anchored[short].key, mode, period) for short, _, mode, period in spec.anchors
    )


def _known(graphs: Mapping[str, Graph]) -> list[str]:
    params = {s.path for graph in graphs.values() for s in graph.inputs if s.kind is Kind.PARAM}
    return [f"{prefix}{path}" for path in sorted(params) for prefix in ("", "Gradient___", UPDATED)]
