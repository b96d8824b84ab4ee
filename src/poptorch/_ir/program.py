"""Program: the static step as a small tree. It prints like what the user asked for."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..enums import OutputMode
from .bundle import Bundle, View
from .graph import Graph
from .loops import Lanes, Loops
from .slot import Kind, Slot


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

    One that does not wait only begins; the next one waits for both.

    Attributes:
        kind: of the tensors: ``accum``, or ``squares`` of what processes have parts of.
        operation: ``mean`` or ``sum``: whether the update divides by the number of processes too.
        processes: how many add theirs.
        buckets: what travels at once; its members are views of it.
        waits: whether all is added up when the next node begins.
    """

    kind: str
    operation: str
    processes: int
    buckets: tuple[Bundle, ...] = ()
    waits: bool = True

    @property
    def bytes(self) -> int:
        """What each process adds."""
        return sum(bucket.slot.bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Shard:
    """Weights of which each process updates a part, and keeps the optimizer's state of that part.

    Attributes:
        whole: the weights behind one another, which every process has.
        part: what each process updates of them: equally many elements, in the processes' order.
    """

    whole: Bundle
    part: Slot


@dataclass(frozen=True)
class Scatter:
    """Add tensors up over the processes; each keeps its part of the sums, and zeros around it.

    Attributes:
        operation: as of a reduction.
        processes: how many add theirs.
        pairs: what each process adds, and the part of it that it keeps.
    """

    operation: str
    processes: int
    pairs: tuple[tuple[Slot, Slot], ...]


@dataclass(frozen=True)
class Gather:
    """Put weights together of which each process has updated its part.

    Attributes:
        processes: how many there are.
        shards: the weights.
    """

    processes: int
    shards: tuple[Shard, ...]


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


Node = Run | Repeat | Reduce | Scatter | Gather | Emit


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
        bundles: weights that share a storage. What graphs read and write is that, or where the
            processes keep parts the weights themselves.
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
        slots = {
            slot.key: slot
            for graph in self.graphs.values()
            for slot in (*graph.inputs, *graph.outputs)
            if slot.is_state
        }
        return slots | {whole.key: whole for whole, _ in self.parts}

    @property
    def stored(self) -> dict[str, Slot]:
        """What has a storage of its own, by key; the other tensors of the state are parts of it."""
        inner = {view.slot.key for view in self.views()} | {part.key for _, part in self.parts}
        inner |= {member.slot.key for bucket in self.buckets for member in bucket.members}
        own = {key: slot for key, slot in self.state_slots().items() if key not in inner}
        return own | {bucket.slot.key: bucket.slot for bucket in self.buckets}

    @property
    def buckets(self) -> list[Bundle]:
        """Tensors of the state that processes exchange at once."""
        reduces = (node for node in self.walk() if isinstance(node, Reduce))
        return [bucket for reduce in reduces for bucket in reduce.buckets]

    @property
    def shards(self) -> list[Shard]:
        """Weights of which each process updates a part."""
        gathers = (node for node in self.walk() if isinstance(node, Gather))
        return [shard for gather in gathers for shard in gather.shards]

    @property
    def parts(self) -> list[tuple[Slot, Slot]]:
        """Each tensor of the state of which a process has a part of its own to write, and that."""
        pairs = [(shard.whole.slot, shard.part) for shard in self.shards]
        scatters = (node for node in self.walk() if isinstance(node, Scatter))
        return [*pairs, *(pair for scatter in scatters for pair in scatter.pairs)]

    def views(self) -> list[View]:
        """Weights, moments and accumulators that are parts of a bundle."""
        members = {bundle.slot.weight: bundle.members for bundle in self.bundles}
        return [
            View(slot.of(member.slot), slot.key, member.offset)
            for slot in self.state_slots().values()
            for member in members.get(slot.weight, ())
        ]

    def visible_slots(self) -> dict[str, Slot]:
        """Every tensor that lives on devices, by key: members in the place of bundles and parts."""
        views, state = self.views(), self.state_slots()
        flat, parts = {view.flat for view in views}, {shard.part.weight for shard in self.shards}
        slots = {k: slot for k, slot in state.items() if k not in flat and slot.weight not in parts}
        spread = (view.slot for view in (*views, *self.spread()))
        return {**slots, **{slot.key: slot for slot in spread}}

    def spread(self) -> list[View]:
        """State of the optimizer that lies in parts on all processes: its place in all parts."""
        members = {shard.part.weight: shard.whole.members for shard in self.shards}
        return [
            View(slot.of(member.slot), slot.key, member.offset)
            for slot in self.state_slots().values()
            if slot.kind is Kind.OPTSTATE
            for member in members.get(slot.weight, ())
        ]

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
