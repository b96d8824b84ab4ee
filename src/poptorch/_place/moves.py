"""What phased execution moves between chips and streaming memory, and when.

Weights, optimizer state and accumulators that rest off chip are loaded by the parts that use them.
Activations leave the chip when the strategy's liveness says so.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from .._ir.layout import Layout
from .._ir.placement import Home, Homes
from .._ir.schedule import Do, Part
from .._ir.slot import Kind, Slot
from .._ir.staged import Moves, Segment
from ..enums import Liveness

Segments = Mapping[Part, Segment]
Lists = defaultdict[Part, list[str]]


def find_moves(segments: Segments, layout: Layout, homes: Homes) -> Moves:
    """Return the moves of a phased strategy; other strategies keep everything on chip."""
    loads, stores, drops = Lists(list), Lists(list), Lists(list)
    placement = layout.placement
    if placement.phased:
        for part, segment in segments.items():
            read = {s.key for s in segment.graph.inputs if _rests_off_chip(s, homes)}
            written = {s.key for s in segment.graph.outputs if _rests_off_chip(s, homes)}
            loads[part] += sorted(read)
            stores[part] += sorted(written)
            drops[part] += sorted(read - written)
        if layout.training and placement.shares_last_phase:
            _share_last_phase(layout, loads, drops)
        if placement.liveness != Liveness.AlwaysLive and not homes.activation.on_chip:
            for before, after, key, is_first in _gaps(segments, layout, homes.activation):
                (stores if is_first else drops)[before].append(key)
                loads[after].append(key)
    return Moves(*({part: tuple(k) for part, k in m.items() if k} for m in (loads, stores, drops)))


def _rests_off_chip(slot: Slot, homes: Homes) -> bool:
    kinds = {
        Kind.PARAM: homes.weight,
        Kind.OPTSTATE: homes.optimizer,
        Kind.ACCUM: homes.accumulator,
        Kind.GRADIENT: homes.accumulator,
    }
    home = kinds.get(slot.kind)
    return home is not None and _is_off_chip(slot, home)


def _is_off_chip(slot: Slot, home: Home) -> bool:
    return not home.on_chip and slot.numel >= max(home.min_off_chip or 0, 2)


def _share_last_phase(layout: Layout, loads: Lists, drops: Lists) -> None:
    """Forward and backward of the last phase are one phase: it loads once, at its start."""
    last = layout.stages[-1].phase
    for index, stage in enumerate(layout.stages):
        if stage.phase == last:
            forward, backward = Part(Do.FORWARD, index), Part(Do.BACKWARD, index)
            loads[forward] = sorted({*loads[forward], *loads.pop(backward, ())})
            drops[backward] = sorted({*drops.pop(forward, ()), *drops[backward]})


def _gaps(segments: Segments, layout: Layout, home: Home) -> Iterator[tuple[Part, Part, str, bool]]:
    """Yield (part, next part, value, whether for the first time) where a value leaves its chip."""
    for slot, source in _values(segments):
        if not _is_off_chip(slot, home):
            continue
        for chip in sorted({segment.chip for segment in segments.values()}):
            events = [
                part
                for part, segment in segments.items()
                if segment.chip == chip and (part == source or slot.key in segment.reads)
            ]
            step = _step(layout, source)
            gaps = [(a, b) for a, b in itertools.pairwise(events) if step(a) != step(b)]
            for at, (before, after) in enumerate(gaps):
                yield before, after, slot.key, at == 0


def _values(segments: Segments) -> Iterator[tuple[Slot, Part]]:
    for part, segment in segments.items():
        if part.do is not Do.UPDATE:
            for slot in segment.graph.outputs:
                if slot.kind is Kind.VALUE:
                    yield slot, part


def _step(layout: Layout, source: Part) -> Callable[[Part], object]:
    """Return what tells apart the parts between which a value leaves the chip."""

    def each_phase(part: Part) -> object:
        return part.do, layout.stages[part.index].phase

    def after_forward(part: Part) -> object:
        if part.do is Do.FORWARD or source.do is Do.BACKWARD:
            return part.do
        return each_phase(part)

    each = layout.placement.liveness == Liveness.OffChipAfterEachPhase
    return each_phase if each else after_forward
