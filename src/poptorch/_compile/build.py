"""Build a Program from the micro graph and the update: its loops, its graphs, and what it
returns.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .. import _place, _update
from .._base.errors import Error
from .._cost.links import Link
from .._ir import slots
from .._ir.bundle import Bundle
from .._ir.graph import Graph, Part, SlotFunction, compose, graph_module
from .._ir.micro_batches import Lanes, Loops
from .._ir.program import Axis, Emit, Gather, Node, Program, Repeat, Run, Shard
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from .._update import Anchor
from .gradient_buckets import reduced, reduction, squares_reduced
from .lower import lower, lower_update


def inference_program(micro: Graph, spec: Spec, lanes: Lanes | None) -> Program:
    """Return ``repeat iterations { repeat replicas { forward } }; emit``, or chunks of lanes."""
    forward = Graph("forward", micro.module, micro.inputs, micro.outputs)
    body = _window(Run("forward"), Axis.ITERATIONS, spec.loops.iterations, spec.loops, lanes)
    graphs = {"forward": forward}
    return Program((*body, _emit(micro, graphs, spec)), graphs, spec.loops, {}, lanes)


def training_program(
    micro: Graph,
    spec: Spec,
    optim: OptimSpec,
    lanes: Lanes | None,
    bundles: tuple[Bundle, ...] = (),
    shards: tuple[Shard, ...] = (),
    early: bool = False,
) -> Program:
    """Return the training step: one graph, or a micro step that accumulates gradients and
    an update.
    """
    loops = spec.loops
    side_by_side = lanes.count if lanes is not None else 1
    runs = loops.accumulation * loops.replicas // side_by_side
    accumulation = _update.Accumulation(
        optim, spec.reduction, side_by_side, runs, loops.processes, loops.all_replicas
    )
    made = _TrainingGraphs(micro, spec, accumulation, shards)
    gather = (Gather(loops.processes, shards),) if shards else ()
    body: tuple[Node, ...]
    if runs > 1:
        graphs = made.separate()
        window = _window(Run("micro"), Axis.ACCUMULATION, loops.accumulation, loops, lanes)
        reduce = reduction(graphs["micro"], spec, shards)
        body = (*window, *reduce, *squares_reduced(graphs, spec), Run("update"), *gather)
    elif loops.processes > 1:
        link = None if shards or not early or not spec.target.link else Link(*spec.target.link)
        parts = (link and _place.early(micro, loops.processes, link)) or (micro,)
        graphs = made.divided(parts)
        exchanged = reduced([graphs[name] for name in _MADE[: len(parts)]], spec, shards)
        body = (*exchanged, *squares_reduced(graphs, spec), Run("update"), *gather)
    else:
        graphs = made.fused()
        body = (Run("step"),)
    body = _repeat(Axis.ITERATIONS, loops.iterations, body)
    graphs = {name: with_updated_weights(graph, spec) for name, graph in graphs.items()}
    return Program((*body, _emit(micro, graphs, spec)), graphs, loops, made.initial, lanes, bundles)


def _in_parts(tensors: Sequence[Slot], parts: Mapping[str, Slot]) -> list[Slot]:
    seen = (slot.of(parts[slot.weight]) if slot.weight in parts else slot for slot in tensors)
    return list(dict.fromkeys(seen))


LEFT = "gradients left"  # name of the graph during which early gradients are summed
_MADE = ("gradients", LEFT)


class _TrainingGraphs:
    def __init__(
        self, micro: Graph, spec: Spec, accumulation: _update.Accumulation, shards: Sequence[Shard]
    ) -> None:
        self.micro, self.spec, self.accumulation = micro, spec, accumulation
        self.optim = accumulation.optim
        self.initial: dict[str, complex] = {}
        part_of = {member.slot.weight: s.part for s in shards for member in s.whole.members}
        self.parts = frozenset(part.path for part in part_of.values())
        self.gradients = micro.gradients
        self.own = _in_parts(self.gradients, part_of)  # the gradients that the update reads
        # weights, or parts of weights, that it changes
        self.updated = _in_parts(micro.trained, part_of)

    def separate(self) -> dict[str, Graph]:
        rounding = self.spec.precision.stochastic_rounding
        add = lower(self.accumulation.accumulate(self.gradients), rounding)
        micro = compose("micro", [self.micro, add])
        return {"micro": micro, **self._ending(self.accumulation.finish)}

    def divided(self, parts: Sequence[Graph]) -> dict[str, Graph]:
        """Return one run, in one or two parts, to whose gradients other processes add theirs, and
        the update.
        """
        made = {}
        for name, part in zip(_MADE, parts, strict=False):
            made[name] = compose(name, [part, lower(self.accumulation.hand_over(part.gradients))])
        return {**made, **self._ending(self.accumulation.take_back)}

    def fused(self) -> dict[str, Graph]:
        scaled = self._lowered(self.accumulation.scale(self.gradients))
        return {"step": compose("step", [self.micro, scaled, self._update()])}

    def _ending(self, descaling: Callable[[Sequence[Slot]], SlotFunction]) -> dict[str, Graph]:
        descaled = self._lowered(descaling(self.own))
        graphs = {"update": compose("update", [descaled, self._update()])}
        of_parts = [slot for slot in self.own if slot.weight in self.parts]
        if of_parts:
            parts = [slot for slot in self.updated if slot.path in self.parts]
            first = lower(descaling(of_parts))
            own = _update.own_squares(self.optim, parts)
            if own is not None:
                emptied = {slot.key for slot in first.outputs}
                graphs["squares"] = compose("squares", [first, lower(own)], drop=emptied)
        return graphs

    def _update(self) -> Part:
        rounding = self.spec.precision.stochastic_rounding
        anchors = [*self._norms(), *self._accumulated()]

        def make(updated: Sequence[Slot], optim: OptimSpec) -> SlotFunction:
            made = _update.lower(optim, updated, rounding, self.parts, anchors)
            self.initial |= made.initial
            return made

        return (
            self._lowered(make(self.updated, self.optim))
            if anchors
            else lower_update(make, self.updated, self.optim)
        )

    def _norms(self) -> Iterator[Anchor]:
        for short, long, *_ in self.spec.anchors:
            if long == slots.NORM:
                yield Anchor(slots.anchor(short, (), torch.float32))

    def _accumulated(self) -> Iterator[Anchor]:
        trained = {path for group in self.optim.groups for path in group.params}
        weights = {
            f"{slots.ACCUMULATED}{slot.path}": slot for slot in self.updated if slot.path in trained
        }
        for short, long, *_ in self.spec.anchors:
            if weight := weights.get(long):
                yield Anchor(slots.anchor(short, weight.shape, weight.dtype), weight.path)

    def _lowered(self, function: SlotFunction) -> Graph:
        self.initial |= function.initial
        return lower(function)


def _window(
    run: Run, axis: Axis, count: int, loops: Loops, lanes: Lanes | None
) -> tuple[Node, ...]:
    if lanes is not None:
        return _repeat(Axis.CHUNKS, count // lanes.steps, (run,))
    return _repeat(axis, count, _repeat(Axis.REPLICAS, loops.replicas, (run,)))


def _repeat(axis: Axis, count: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
    return body if count == 1 else (Repeat(axis, count, body),)


def emit(micro: Graph, spec: Spec) -> Emit:
    kinds = (*slots.RETURNED, Kind.ANCHOR)
    results = tuple(slot for slot in micro.outputs if slot.kind in kinds)
    return Emit(results, spec.output.mode, spec.output.period)


UPDATED = "UpdatedVar___"


def with_updated_weights(graph: Graph, spec: Spec) -> Graph:
    written = {
        f"{UPDATED}{slot.path}": at
        for at, slot in enumerate(graph.outputs)
        if slot.kind is Kind.PARAM
    }
    anchored_weights = [
        (short, written[long]) for short, long, *_ in spec.anchors if long in written
    ]
    if not anchored_weights:
        return graph
    copied = graph.copy()
    returned = copied.returned
    copied.module.graph.output_node().args = (
        (*returned, *(returned[at] for _, at in anchored_weights)),
    )
    weights = ((short, graph.outputs[at]) for short, at in anchored_weights)
    anchored = [slots.anchor(short, weight.shape, weight.dtype) for short, weight in weights]
    module = graph_module(copied.module, copied.module.graph)
    return Graph(graph.name, module, graph.inputs, (*graph.outputs, *anchored))


def _emit(micro: Graph, graphs: Mapping[str, Graph], spec: Spec) -> Emit:
    """Return what is returned to the host: results, then anchors in the user's order."""
    results = [slot for slot in micro.outputs if slot.kind in slots.RETURNED]
    outputs = [slot for graph in graphs.values() for slot in graph.outputs]
    anchored = {slot.path: slot for slot in outputs if slot.kind is Kind.ANCHOR}
    exceptions = []
    for short, long, mode, period in spec.anchors:
        if short not in anchored:
            close = difflib.get_close_matches(long, _known(graphs), n=3)
            raise Error(
                f"No tensor with name {long} to anchor",
                got=f"anchorTensor({short!r}, {long!r})",
                fix=f"did you mean {' or '.join(close)}?"
                if close
                else "getTensorNames() of a compiled model lists the names",
            )
        results.append(anchored[short])
        exceptions.append((anchored[short].key, mode, period))
    return Emit(tuple(results), spec.output.mode, spec.output.period, tuple(exceptions))


_PREFIXES = ("", "Gradient___", slots.ACCUMULATED, UPDATED)


def _known(graphs: Mapping[str, Graph]) -> list[str]:
    params = {s.path for graph in graphs.values() for s in graph.inputs if s.kind is Kind.PARAM}
    return [f"{prefix}{path}" for path in sorted(params) for prefix in _PREFIXES]
