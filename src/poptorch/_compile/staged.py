"""Layout + optimizer -> Staged: the program cut into one graph per part, and its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import _place, _schedule, _update
from .._ir.graph import Graph, compose
from .._ir.layout import Layout
from .._ir.optim_spec import OptimSpec
from .._ir.placement import Strategy
from .._ir.schedule import Do, Part, Work
from .._ir.slot import Kind
from .._ir.spec import Spec
from .._ir.staged import Moves, Segment, Staged, Transfer
from .build import update_graph
from .lower import lower

Segments = Mapping[Part, Segment]
Homes = Mapping[str, tuple[int, ...]]


def stage(layout: Layout, spec: Spec, optim: OptimSpec | None) -> Staged:
    """Cut a placed program into parts that run one by one, each on its chip.

    Every replica has accumulators of its own; they are added up before the update.
    """
    segments = _place.split(layout, _recomputes(layout, spec))
    homes = dict(layout.homes)
    if optim is not None:
        tally = _tally(spec)
        segments = {
            part: _accumulating(segment, spec, optim, tally) for part, segment in segments.items()
        }
        update = _update_graph(layout.graph, spec, optim, tally)
        update_homes = _place.update_homes(update, homes)
        segments |= _place.split_update(update, update_homes)
        homes = _united(homes, update_homes)
    moves = _place.find_moves(segments, layout, spec.homes)
    work = _work(segments, layout, spec, moves)
    schedule = _schedule.make(work, layout.placement)
    _schedule.check(schedule, work)
    return Staged(segments, homes, tuple(_transfers(segments)), moves, work, schedule)


def _recomputes(layout: Layout, spec: Spec) -> bool:
    """Pipelined training computes activations again unless the user decides otherwise."""
    chosen = spec.hint("autoRecomputation")
    if chosen is not None:
        return bool(chosen)
    return layout.placement.strategy is Strategy.PIPELINED and len(layout.stages) > 1


def _tally(spec: Spec) -> _update.Tally:
    loops = spec.loops
    return _update.Tally(chunks=loops.accumulation, summed=loops.replicas, replicas=loops.replicas)


def _accumulating(segment: Segment, spec: Spec, optim: OptimSpec, tally: _update.Tally) -> Segment:
    gradients = [slot for slot in segment.graph.outputs if slot.kind is Kind.GRADIENT]
    if not gradients or tally.chunks == 1:
        return segment
    accumulate = lower(_update.accumulate(optim, gradients, spec.reduction, tally))
    graph = compose(segment.graph.name, [segment.graph, accumulate])
    return Segment(segment.part, segment.chip, graph)


def _update_graph(micro: Graph, spec: Spec, optim: OptimSpec, tally: _update.Tally) -> Graph:
    gradients = [slot for slot in micro.outputs if slot.kind is Kind.GRADIENT]
    trained = {slot.path for slot in gradients}
    params = [s for s in micro.inputs if s.kind is Kind.PARAM and s.path in trained]
    make = _update.scale if tally.chunks == 1 else _update.finish
    piece = make(optim, gradients, spec.reduction, tally)
    if piece is None:
        return update_graph(optim, params, micro)[0]
    before = lower(piece)
    return compose("update", [before, update_graph(optim, params, before)[0]])


def _united(first: Homes, second: Homes) -> dict[str, tuple[int, ...]]:
    keys = dict.fromkeys([*first, *second])
    return {key: tuple(sorted({*first.get(key, ()), *second.get(key, ())})) for key in keys}


def _work(segments: Segments, layout: Layout, spec: Spec, moves: Moves) -> Work:
    makers = {key: part for part, segment in segments.items() for key in segment.writes}
    needs = {}
    for part, segment in segments.items():
        found = {makers[key] for key in segment.reads}
        if part.do is Do.BACKWARD:
            found.add(Part(Do.FORWARD, part.index))
        found |= {
            other
            for other, keys in moves.stores.items()
            if segments[other].chip == segment.chip
            and other != part
            and set(keys) & set(moves.loads.get(part, ())) & segment.reads
        }
        if part.do is not Do.UPDATE:
            needs[part] = frozenset(found)
    loops = spec.loops
    return Work(
        chips=tuple(stage.chip for stage in layout.stages),
        micros=loops.accumulation if layout.training else loops.iterations,
        training=layout.training,
        needs=needs,
        updates=_rounds([part for part in segments if part.do is Do.UPDATE]),
        loads=frozenset(moves.loads),
        stores=frozenset(moves.stores),
        phases=tuple(stage.phase for stage in layout.stages),
    )


def _rounds(parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    count = max((part.round + 1 for part in parts), default=0)
    return tuple(tuple(p.index for p in parts if p.round == number) for number in range(count))


def _transfers(segments: Segments) -> list[Transfer]:
    found = []
    for part, segment in segments.items():
        for slot in segment.graph.outputs:
            if slot.kind is not Kind.VALUE:
                continue
            readers = {s.chip for s in segments.values() if slot.key in s.reads}
            found += [Transfer(slot, part, chip) for chip in sorted(readers - {segment.chip})]
    return found
