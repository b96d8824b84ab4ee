"""Staged: a program cut into one graph per part, with what passes between parts and chips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph
from .schedule import Part, Schedule, Work
from .slot import Kind, Slot


@dataclass(frozen=True, eq=False)
class Segment:
    """One part of the work as a graph.

    Its inputs are state and micro-batches, which its own chip holds, and ``value.*``: results of
    other segments for the same micro-batch. Its outputs are results for the host, new state of its
    own chip, and ``value.*``.
    """

    part: Part
    chip: int
    graph: Graph

    @property
    def reads(self) -> frozenset[str]:
        """Keys of the values that it reads."""
        return frozenset(slot.key for slot in self.graph.inputs if slot.kind is Kind.VALUE)

    @property
    def writes(self) -> frozenset[str]:
        """Keys of the values that it writes."""
        return frozenset(slot.key for slot in self.graph.outputs if slot.kind is Kind.VALUE)


@dataclass(frozen=True)
class Transfer:
    """A value that goes from one chip to another after a part is done.

    Attributes:
        value: the slot, with the shape for one micro-batch.
        source: the part that makes it.
        target: the chip that gets it.
    """

    value: Slot
    source: Part
    target: int


@dataclass(frozen=True)
class Moves:
    """Tensors between chip and streaming memory, by slot key.

    Attributes:
        loads: brought to the chip before a part.
        stores: taken off the chip after a part.
        drops: forgotten on the chip after a part; streaming memory still has them.
    """

    loads: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    stores: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    drops: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Staged:
    """A program that can be run part by part.

    Attributes:
        segments: the graphs, by part.
        homes: chips that hold each state tensor, optimizer state included, by slot key.
        transfers: what passes between chips.
        moves: what passes between a chip and streaming memory.
        work: what has to be done.
        schedule: in which order.
    """

    segments: Mapping[Part, Segment]
    homes: Mapping[str, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    moves: Moves
    work: Work
    schedule: Schedule
