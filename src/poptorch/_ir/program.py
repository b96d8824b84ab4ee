"""Define ``Program``, the static step as a small tree that can be printed, and ``State``."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .._base import resources
from ..enums import OutputMode
from .bundle import Bundle, BundleView, Member
from .graph import Graph, slots_of
from .micro_batches import Lanes, Loops
from .slots import STATE_KINDS, Kind, Slot

Of = TypeVar("Of")


class Axis(enum.StrEnum):
    ITERATIONS = "iterations"
    CHUNKS = "chunks"
    ACCUMULATION = "accumulation"
    REPLICAS = "replicas"


@dataclass(frozen=True)
class Run:
    graph: str


@dataclass(frozen=True)
class Repeat:
    axis: Axis
    count: int
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Reduce:
    """Sum tensors of one kind over the processes, in place, one flat bucket after another."""

    kind: str  # accum, or squares of parts of weights
    operation: str  # mean or sum: whether the update also divides by the number of processes
    processes: int
    buckets: tuple[Bundle, ...] = ()  # one bucket is one exchange; its members are views of it
    # whether to wait for all sums, including those that an earlier Reduce has only started
    waits: bool = True

    @property
    def bytes(self) -> int:
        return sum(bucket.slot.bytes for bucket in self.buckets)

    def text(self, program: Program) -> str:
        count = len(self.buckets)
        buckets = f"{count} bucket{'' if count == 1 else 's'}, {self.bytes} bytes"
        gradients = self.kind == Kind.ACCUM
        what = f"reduce {self.kind}{'.*' if gradients else ''} {self.operation}"
        early = sum(node.bytes for node in program.nodes(Reduce) if not node.waits)
        when = ""
        if not self.waits:
            when = ", while the next graph runs"
        elif gradients:
            overlap = f"{early} bytes overlap" if early else "nothing overlaps"
            when = f", after all gradients; {overlap}"
        return f"{what} over {self.processes} processes  # {buckets}{when}{_divides(self)}"


@dataclass(frozen=True)
class Shard:
    whole: Bundle  # the weights one after another, which every process has
    # what each process updates: the same number of elements in each, in the order of processes
    part: Slot


@dataclass(frozen=True)
class Scatter:
    """Sum tensors over the processes. Each keeps its part of the sums, and zeros around it."""

    operation: str  # as in Reduce
    processes: int
    pairs: tuple[tuple[Slot, Slot], ...]  # what each process adds, and the part that it keeps

    def text(self, _: Program) -> str:
        size = sum(whole.bytes for whole, _ in self.pairs)
        what = f"scatter accum.* {self.operation} over {self.processes} processes"
        return f"{what}  # {size} bytes, each gets its part{_divides(self)}"


@dataclass(frozen=True)
class Gather:
    processes: int
    shards: tuple[Shard, ...]

    def text(self, _: Program) -> str:
        size = sum(shard.whole.slot.bytes for shard in self.shards)
        return f"gather param.* over {self.processes} processes  # {size} bytes"


@dataclass(frozen=True)
class Emit:
    slots: tuple[Slot, ...]
    mode: OutputMode
    period: int = 1
    exceptions: tuple[tuple[str, OutputMode, int], ...] = ()  # (slot key, mode, period)

    def mode_of(self, key: str) -> tuple[OutputMode, int]:
        for name, mode, period in self.exceptions:
            if name == key:
                return mode, period
        return self.mode, self.period

    def count(self, key: str, loops: Loops) -> int:
        mode, period = self.mode_of(key)
        if mode in (OutputMode.Final, OutputMode.Sum):
            return loops.replicas
        kept = loops.iterations // (period if mode is OutputMode.EveryN else 1)
        return kept * loops.accumulation * loops.replicas

    def text(self, _: Program) -> str:
        period = f" {self.period}" if self.mode is OutputMode.EveryN else ""
        names = ", ".join(families(self.slots)) or "nothing"
        return f"emit {names} {self.mode.name.lower()}{period}"


Node = Run | Repeat | Reduce | Scatter | Gather | Emit


@dataclass(frozen=True, eq=False)
class Program:
    """A whole call: loops around runs of graphs, then the results.

    With lanes, slots of batches and results have a leading lane dimension, and slots of state with
    a value for each replica have a replica dimension. Graphs read and write bundles, or the weights
    themselves if processes keep parts.
    """

    body: tuple[Node, ...]  # the last node is the Emit
    graphs: Mapping[str, Graph]  # graphs by name
    loops: Loops
    # initial values of state that the update introduces, by slot key
    initial: Mapping[str, complex]
    lanes: Lanes | None = None
    bundles: tuple[Bundle, ...] = ()  # weights that share a storage
    # computes values from weights, before a call if the weights have changed
    prepare: Graph | None = None

    @property
    def emit(self) -> Emit:
        last = self.body[-1]
        assert isinstance(last, Emit)
        return last

    @property
    def random(self) -> bool:
        return any(graph.random for graph in self.graphs.values())

    def state_slots(self) -> dict[str, Slot]:
        graphs = [*self.graphs.values(), *([self.prepare] if self.prepare is not None else [])]
        slots = slots_of(graphs)
        state = {key: slot for key, slot in slots.items() if slot.is_state}
        return state | {whole.key: whole for whole, _ in self.parts}

    @property
    def stored(self) -> dict[str, Slot]:
        """Slots with their own storage, by key. Other tensors of the state are parts of these."""
        inner = {view.slot.key for view in self.views()} | {part.key for _, part in self.parts}
        inner |= {member.slot.key for bucket in self.buckets for member in bucket.members}
        own = {key: slot for key, slot in self.state_slots().items() if key not in inner}
        return own | {bucket.slot.key: bucket.slot for bucket in self.buckets}

    @property
    def buckets(self) -> list[Bundle]:
        return [bucket for reduce in self.nodes(Reduce) for bucket in reduce.buckets]

    @property
    def shards(self) -> list[Shard]:
        return [shard for gather in self.nodes(Gather) for shard in gather.shards]

    @property
    def parts(self) -> list[tuple[Slot, Slot]]:
        """Each tensor of the state that a process writes only in part, with that part."""
        pairs = [(shard.whole.slot, shard.part) for shard in self.shards]
        return [*pairs, *(pair for scatter in self.nodes(Scatter) for pair in scatter.pairs)]

    def views(self) -> list[BundleView]:
        return self._views({bundle.slot.weight: bundle.members for bundle in self.bundles})

    def visible_slots(self) -> dict[str, Slot]:
        """Every tensor that is on devices, by key: members instead of bundles and parts."""
        views, state = self.views(), self.state_slots()
        flat, parts = {view.flat for view in views}, {shard.part.weight for shard in self.shards}
        slots = {k: slot for k, slot in state.items() if k not in flat and slot.weight not in parts}
        spread = (view.slot for view in (*views, *self.spread()))
        return {**slots, **{slot.key: slot for slot in spread}}

    def spread(self) -> list[BundleView]:
        """State of the optimizer that is divided over all processes: its position in all parts."""
        members = {shard.part.weight: shard.whole.members for shard in self.shards}
        return self._views(members, (Kind.OPTSTATE,))

    def _views(
        self, members: Mapping[str, Sequence[Member]], kinds: Collection[Kind] = STATE_KINDS
    ) -> list[BundleView]:
        return [
            BundleView(slot.of(member.slot), slot.key, member.offset)
            for slot in self.state_slots().values()
            if slot.kind in kinds
            for member in members.get(slot.weight, ())
        ]

    def walk(self, body: Sequence[Node] | None = None) -> Iterator[Node]:
        for node in self.body if body is None else body:
            yield node
            if isinstance(node, Repeat):
                yield from self.walk(node.body)

    def nodes(self, kind: type[Of]) -> Iterator[Of]:
        return (node for node in self.walk() if isinstance(node, kind))

    def __str__(self) -> str:
        lines = [line for node in self.body for line in self._lines(node, ())]
        if self.prepare is not None:
            lines = ["when weights change", f"  {self._run_text(self.prepare, ())}", *lines]
        return "\n".join(lines)

    def _lines(self, node: Node, axes: tuple[Axis, ...]) -> Iterator[str]:
        if isinstance(node, Repeat):
            yield f"repeat {node.count} {self._unit(node)}"
            for child in node.body:
                yield from (f"  {line}" for line in self._lines(child, (*axes, node.axis)))
        elif isinstance(node, Run):
            yield self._run_text(self.graphs[node.graph], axes)
        else:
            yield node.text(self)

    def _unit(self, node: Repeat) -> str:
        if node.axis is Axis.CHUNKS and self.lanes is not None:
            micro_batches = node.count * self.lanes.count
            return f"chunks of {self.lanes.count} lanes  # {micro_batches} micro-batches"
        return node.axis if node.axis is not Axis.ACCUMULATION else "micro-batches"

    def _run_text(self, graph: Graph, axes: tuple[Axis, ...]) -> str:
        lanes = [f"{self.lanes.count} lanes"] if self.lanes is not None else []
        index = ",".join([*(axis[0] for axis in axes), *lanes])
        reads = [
            f"batch[{index}]" if family == "batch.*" and index else family
            for family in families(graph.inputs)
        ]
        writes = [
            f"{family} +=" if family == "accum.*" and graph.name == "micro" else family
            for family in families(graph.outputs)
        ]
        return f"run {graph.name}({', '.join(reads)}) -> {', '.join(writes)}"


def families(slots: Iterable[Slot]) -> list[str]:
    """Return ``param.*`` and so on, in the order of the kinds; a loss is just ``loss``."""
    kinds = {slot.kind for slot in slots}
    return ["loss" if kind is Kind.LOSS else f"{kind}.*" for kind in Kind if kind in kinds]


def _divides(node: Reduce | Scatter) -> str:
    return "; update divides" if node.operation == "mean" else ""


@dataclass
class Writes:
    """What programs that share weights and buffers on a device also share.

    Attributes:
        count: how many times these have changed.
        released: weights whose memory was released, by key, as views of copies in another layout,
            which now are the only ones with the values.
    """

    count: int = 0
    released: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def release(self, key: str, plain: torch.Tensor, copy: torch.Tensor) -> None:
        """Release a weight's memory. No program reads it until it changes."""
        self.released[key] = plain, copy
        resources.release_pages(plain.data_ptr(), plain.nbytes)

    def restore(self) -> None:
        """Restore the values of all weights, from the copies, which only have another layout."""
        while self.released:
            key, (plain, copy) = next(iter(self.released.items()))
            plain.copy_(copy.to_dense())
            del self.released[key]


@dataclass(eq=False)
class State:
    """The device's copy of everything that stays between calls. It is the only mutable value."""

    # By slot key, in the ``device_shape``. They are only written in place, because executables bind
    # to them once. Those that are released read as zeros.
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    rng: torch.Tensor | None = None  # state of the device's generator; None before it is seeded
    updates: int = 0
    writes: Writes = field(default_factory=Writes)
    # What executables store with the state: their bound arguments, and copies of what they change.
    bound: tuple[object, int | None, Any] | None = None
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    device: torch.device = field(default=torch.device("cpu"))
    other: State | None = None  # to which a second executable of the same program is bound

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The same tensors, after restoring those that were released."""
        self.writes.restore()
        return self.values

    def for_second_executable(self) -> State:
        """Return the other state, which has the same tensors."""
        if self.other is None:
            self.other = State(self.values, writes=self.writes, device=self.device)
        return self.other

    def write(self, key: str, value: torch.Tensor) -> None:
        self.values[key].copy_(value.detach())
        self.writes.released.pop(key, None)
        self.writes.count += 1

    def read(self, slot: Slot, replica: int = 0) -> torch.Tensor:
        """Return a tensor as a graph reads it: the values of all replicas if it has lanes."""
        value = self.values[slot.key]
        return value[replica] if slot.replicas > 1 and not slot.lanes else value
