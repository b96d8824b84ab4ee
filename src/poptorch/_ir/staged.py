"""Staged: a program cut into one graph per stage pass, with what passes between chips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import Graph
from .schedule import Schedule
from .slot import Kind, Slot
from .stage_pass import StagePass
from .workload import Workload


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
    """

    graphs: Mapping[StagePass, Graph]
    homes: Mapping[str, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    workload: Workload
    schedule: Schedule


def values_read(graph: Graph) -> frozenset[str]:
    """Keys of the values that a pass reads."""
    return frozenset(slot.key for slot in graph.inputs if slot.kind is Kind.VALUE)


def values_written(graph: Graph) -> frozenset[str]:
    """Keys of the values that a pass writes."""
    return frozenset(slot.key for slot in graph.outputs if slot.kind is Kind.VALUE)
