"""Decide what phased execution moves between chips and streaming memory, and when."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from .._ir.block_labels import Direction, StagePass
from .._ir.graph import Graph
from .._ir.plan import Layout, values_read
from .._ir.schedule import Streaming
from .._ir.slots import Kind, Slot
from .._ir.spec import Location, Spec
from ..enums import Liveness

Lists = defaultdict[StagePass, list[str]]


def find_streaming(graphs: Mapping[StagePass, Graph], layout: Layout, spec: Spec) -> Streaming:
    placement, locations = spec.placement, spec.locations
    if not placement.phased:
        return Streaming()

    def is_stored_off_chip(slot: Slot) -> bool:
        handed_on = slot.kind is Kind.GRADIENT
        return (locations.accumulator if handed_on else locations.of(slot)).off_chip(slot)

    loads, stores, drops = Lists(list), Lists(list), Lists(list)
    for stage_pass, graph in graphs.items():
        read = {s.key for s in graph.inputs if is_stored_off_chip(s)}
        written = {s.key for s in graph.outputs if is_stored_off_chip(s)}
        loads[stage_pass] += sorted(read)
        stores[stage_pass] += sorted(written)
        drops[stage_pass] += sorted(read - written)
    if spec.training and placement.shares_last_phase:
        # Forward and backward of the last phase are one phase, which loads once, at its start.
        for index, stage in enumerate(layout.stages):
            if stage.phase == layout.stages[-1].phase:
                forward, backward = StagePass(index), StagePass(index, Direction.BACKWARD)
                loads[forward] = sorted({*loads[forward], *loads.pop(backward, ())})
                drops[backward] = sorted({*drops.pop(forward, ()), *drops[backward]})
    if placement.liveness != Liveness.AlwaysLive and not locations.activation.on_chip:
        each_phase = placement.liveness == Liveness.OffChipAfterEachPhase
        for before, after, key, is_first in _gaps(graphs, layout, locations.activation, each_phase):
            (stores if is_first else drops)[before].append(key)
            loads[after].append(key)
    lists = ({p: tuple(keys) for p, keys in by.items() if keys} for by in (loads, stores, drops))
    return Streaming(*lists)


def _gaps(
    graphs: Mapping[StagePass, Graph], layout: Layout, location: Location, each_phase: bool
) -> Iterator[tuple[StagePass, StagePass, str, bool]]:
    """Yield (pass, next pass, value, whether for the first time) where a value leaves its chip."""

    def period(stage_pass: StagePass, source: StagePass) -> tuple[Direction, int | None]:
        fetched_back = stage_pass.backward and not source.backward
        phase = layout.stages[stage_pass.stage].phase
        return stage_pass.direction, phase if each_phase or fetched_back else None

    passes = [stage_pass for stage_pass in graphs if not stage_pass.is_update]
    chips = {stage_pass: layout.stages[stage_pass.stage].chip for stage_pass in passes}
    readers = {stage_pass: values_read(graphs[stage_pass]) for stage_pass in passes}
    for source in passes:
        for slot in graphs[source].outputs:
            if slot.kind is not Kind.VALUE or not location.off_chip(slot):
                continue
            users = [p for p in passes if p == source or slot.key in readers[p]]
            for chip in sorted(set(chips.values())):
                on_chip = itertools.pairwise(p for p in users if chips[p] == chip)
                gaps = [(a, b) for a, b in on_chip if period(a, source) != period(b, source)]
                for at, (before, after) in enumerate(gaps):
                    yield before, after, slot.key, at == 0
