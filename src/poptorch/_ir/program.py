"""Program: the static step as a small tree. It prints like what the user asked for."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..enums import OutputMode
from .bundle import Bundle, View
from .graph import Graph
from .loops import Lanes, Loops
from .slot import Slot


class Axis(enum.StrEnum):
    """What a loop counts, slowest first in the order of a combined batch."""

    ITERATIONS = "iterations"
    CHUNKS = "chunks"
    ACCUMULATION = "accumulation"
    REPLICAS = "replicas"


@dataclass(frozen=True)
class Run:
    """Run one graph on the device's state and, if it reads any, one micro-batch."""

    graph: str


@dataclass(frozen=True)
class Repeat:
    """Run the body ``count`` times; inputs and outputs advance along the axis."""

    axis: Axis
    count: int
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Reduce:
    """Add tensors of one kind up over the processes, in place, one flat bucket after another.

    Attributes:
        kind: of the tensors.
        operation: ``mean`` or ``sum``: whether the update divides by the number of processes too.
        processes: how many add theirs.
        buckets: what travels at once; its members are views of it.
    """

    kind: str
    operation: str
    processes: int
    buckets: tuple[Bundle, ...] = ()

    @property
    def bytes(self) -> int:
        """What each process adds."""
        return sum(bucket.slot.bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Emit:
    """Return results to the host: which tensors, and which of a call's many values."""

    slots: tuple[Slot, ...]
    mode: OutputMode
    period: int = 1
    exceptions: tuple[tuple[str, OutputMode, int], ...] = ()  # (slot key, mode, period)

    def mode_of(self, key: str) -> tuple[OutputMode, int]:
        """Return the mode and period of a slot."""
        for name, mode, period in self.exceptions:
            if name == key:
                return mode, period
        return self.mode, self.period

    def count(self, key: str, loops: Loops) -> int:
        """Return how many results of a slot that every micro-batch writes a call returns."""
        mode, period = self.mode_of(key)
        if mode in (OutputMode.Final, OutputMode.Sum):
            return loops.replicas
        kept = loops.iterations // (period if mode is OutputMode.EveryN else 1)
        return kept * loops.accumulation * loops.replicas


Node = Run | Repeat | Reduce | Emit


@dataclass(frozen=True, eq=False)
class Program:
    """A whole call: loops around runs of graphs, then the results.

    Attributes:
        body: the nodes, in order; the last is the Emit.
        graphs: the graphs that runs name.
        loops: the counts, for cutting batches and numbering replicas.
        initial: first values of state that the update introduces, by slot key.
        lanes: what runs side by side, or None. Slots of batches and results then have a leading
            lane dimension, and those of state with a value for each replica a replica one.
        bundles: weights that share a storage; what the graphs read and write is that.
    """

    body: tuple[Node, ...]
    graphs: Mapping[str, Graph]
    loops: Loops
    initial: Mapping[str, float]
    lanes: Lanes | None = None
    bundles: tuple[Bundle, ...] = ()

    @property
    def emit(self) -> Emit:
        """The last node."""
        last = self.body[-1]
        assert isinstance(last, Emit)
        return last

    @property
    def random(self) -> bool:
        """Whether a call draws random numbers."""
        return any(graph.random for graph in self.graphs.values())

    def state_slots(self) -> dict[str, Slot]:
        """Every tensor that lives on the device, by key."""
        return {
            slot.key: slot
            for graph in self.graphs.values()
            for slot in (*graph.inputs, *graph.outputs)
            if slot.is_state
        }

    @property
    def buckets(self) -> list[Bundle]:
        """Tensors of the state that processes exchange at once."""
        reduces = (node for node in self.walk() if isinstance(node, Reduce))
        return [bucket for reduce in reduces for bucket in reduce.buckets]

    def views(self) -> list[View]:
        """Weights, moments and accumulators that are parts of a bundle."""
        members = {bundle.slot.weight: bundle.members for bundle in self.bundles}
        return [
            View(slot.of(member.slot), slot.key, member.offset)
            for slot in self.state_slots().values()
            for member in members.get(slot.weight, ())
        ]

    def visible_slots(self) -> dict[str, Slot]:
        """Every tensor that lives on the device, by key: members in the place of bundles."""
        views = self.views()
        flat = {view.flat for view in views}
        slots = {key: slot for key, slot in self.state_slots().items() if key not in flat}
        return {**slots, **{view.slot.key: view.slot for view in views}}

    def walk(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = list(reversed(self.body))
        while stack:
            node = stack.pop()
            yield node
            if isinstance(node, Repeat):
                stack.extend(reversed(node.body))

    def __str__(self) -> str:
        from .text import program_text

        return program_text(self)
