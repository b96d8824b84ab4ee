"""Staged: a program cut into one graph per stage pass, with what passes between chips."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph
from .schedule import Schedule
from .slot import Kind, Slot
from .stage_pass import StagePass
from .workload import Workload

RESULTS = (Kind.LOSS, Kind.OUTPUT, Kind.ANCHOR, Kind.BATCH)
"""What passes make for the host."""
PER_MICRO_BATCH = (Kind.VALUE, Kind.BATCH)
"""What passes read of which every micro-batch has its own."""


@dataclass(frozen=True)
class Transfer:
    """A value that goes from one chip to another after a pass is done.

    Attributes:
        value: the slot, with the shape for one micro-batch.
        source: the pass that makes it.
        target: the chip that gets it.
    """

    value: Slot
    source: StagePass
    target: int


@dataclass(frozen=True, eq=False)
class Staged:
    """A program that can be run pass by pass.

    Attributes:
        graphs: by pass, in their order. Inputs are state and micro-batches, which the pass's own
            chip holds, and ``value.*``: results of other passes for the same micro-batch. Outputs
            are results for the host, new state of the chip, and ``value.*``.
        homes: chips that hold each state tensor, optimizer state included, by slot key.
        transfers: what passes between chips.
        workload: what has to be done.
        schedule: in which order.
        parts: which of the processes that share the stages runs each chip; empty for one process.
    """

    graphs: Mapping[StagePass, Graph]
    homes: Mapping[str, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    workload: Workload
    schedule: Schedule
    parts: Mapping[int, int] = field(default_factory=dict)

    def part_of(self, stage_pass: StagePass) -> int:
        """Return which process does a pass."""
        return self.parts.get(self.workload.chip_of(stage_pass), 0)

    def holders(self, key: str) -> list[int]:
        """Return the processes whose chips hold a state tensor; the first one's value counts."""
        return sorted({self.parts.get(chip, 0) for chip in self.homes[key]})

    def last_readers(self) -> dict[tuple[int, str], StagePass]:
        """Return the last pass on a chip that reads a value or batch input, by chip and key."""
        return {
            (self.workload.chip_of(each), slot.key): each
            for each, graph in self.graphs.items()
            for slot in graph.inputs
            if slot.kind in PER_MICRO_BATCH
        }

    def forgotten(self) -> dict[StagePass, list[str]]:
        """Return what no pass of a chip reads after this one, by slot key."""
        forgotten: dict[StagePass, list[str]] = defaultdict(list)
        for (_, key), stage_pass in self.last_readers().items():
            forgotten[stage_pass].append(key)
        return forgotten

    def targets(self) -> dict[str, list[int]]:
        """Return the chips that each value is sent to, by slot key."""
        targets: dict[str, list[int]] = defaultdict(list)
        for transfer in self.transfers:
            targets[transfer.value.key].append(transfer.target)
        return targets

    def makers(self) -> dict[str, int]:
        """Return which process has each result for the host, by slot key."""
        return {
            slot.key: self.part_of(each)
            for each, graph in self.graphs.items()
            for slot in graph.outputs
            if slot.kind in RESULTS
        }


def values_read(graph: Graph) -> frozenset[str]:
    """Keys of the values that a pass reads."""
    return frozenset(slot.key for slot in graph.inputs if slot.kind is Kind.VALUE)


def values_written(graph: Graph) -> frozenset[str]:
    """Keys of the values that a pass writes."""
    return frozenset(slot.key for slot in graph.outputs if slot.kind is Kind.VALUE)
