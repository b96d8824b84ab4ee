"""Going through a schedule's actions in the order in which the ``staged`` backend does them.

Every chip does its row's actions one after another. One begins when its chip is free and what it
reads has been computed and has arrived; until then the chip waits. What is sent keeps the sender
busy. The parts of every chip's time add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .._ir.blocks import StagePass
from .._ir.schedule import Action, Traffic
from .._ir.slots import Kind
from .priced import PassPrice, Subject, price_passes
from .sizes import slot_bytes


@dataclass(frozen=True)
class Parts:
    """Cycles of one chip, by what it does.

    Attributes:
        compute: its tiles compute.
        exchange: its tiles exchange data with one another or with other chips.
        sync: its tiles wait for one another.
        host: it waits for data from the host, or for the host to take some.
        streaming: it waits for its streaming memory.
        bubble: it waits for other chips.
        call: it waits for the host to make the next call.
    """

    compute: float = 0.0
    exchange: float = 0.0
    sync: float = 0.0
    host: float = 0.0
    streaming: float = 0.0
    bubble: float = 0.0
    call: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        inside = self.compute + self.exchange + self.sync
        return inside + self.host + self.streaming + self.bubble + self.call

    def plus(self, other: Parts, often: float = 1.0) -> Parts:
        """Return the sum with so many of another."""
        return Parts(
            self.compute + often * other.compute,
            self.exchange + often * other.exchange,
            self.sync + often * other.sync,
            self.host + often * other.host,
            self.streaming + often * other.streaming,
            self.bubble + often * other.bubble,
            self.call + often * other.call,
        )


NONE = Parts()


@dataclass(frozen=True)
class Cell:
    """One action, when and how long.

    Attributes:
        column, chip, action: which.
        start: cycles after the schedule's beginning.
        parts: of its own time, without waiting.
        sent: cycles until what it sends has arrived.
    """

    column: int
    chip: int
    action: Action
    start: float
    parts: Parts
    sent: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule with its times.

    Attributes:
        cells: every action, in the order of the columns.
        by_chip: cycles of one run of the schedule by chip; all have the same total.
        cycles: of one run.
        passes: the prices that were used.
    """

    cells: tuple[Cell, ...]
    by_chip: Mapping[int, Parts]
    cycles: float
    passes: Mapping[StagePass, PassPrice]


def simulate(subject: Subject) -> Timeline:
    """Return how long a schedule takes, by action."""
    return _Clock(subject, price_passes(subject)).run()


class _Clock:
    """Adds up actions."""

    def __init__(self, subject: Subject, passes: Mapping[StagePass, PassPrice]) -> None:
        self._subject = subject
        self._passes = passes
        self._clock = subject.chip.kind.clock_mhz * 1e6
        self._own: dict[tuple[StagePass, Traffic | None], Parts] = {}
        self._sent: dict[tuple[StagePass, Traffic | None], float] = {}
        self._slots = {
            slot.key: slot
            for graph in subject.staged.graphs.values()
            for slot in (*graph.inputs, *graph.outputs)
        }

    def run(self) -> Timeline:
        """Go through the schedule."""
        schedule, workload = self._subject.staged.schedule, self._subject.staged.workload
        free = dict.fromkeys(schedule.rows, 0.0)
        by_chip = dict.fromkeys(schedule.rows, NONE)
        ends: dict[Action, float] = {}
        cells: list[Cell] = []
        rounds = -1
        for column, chip, action in schedule.cells():
            if action.stage_pass.is_update and action.stage_pass.round > rounds:
                rounds = action.stage_pass.round
                self._meet(free, by_chip)
                if rounds == 0:
                    self._reduce(free, by_chip)
            needed = () if action.traffic else workload.needs.get(action.stage_pass, ())
            ready = max((ends[Action(n, action.micro_batch)] for n in needed), default=0.0)
            start = max(free[chip], ready)
            parts, sent = self._parts(action), self._sending(action)
            waited = Parts(bubble=start - free[chip])
            outside = Parts(exchange=sent, sync=self._sync if sent else 0.0)
            by_chip[chip] = by_chip[chip].plus(waited).plus(parts).plus(outside)
            cells.append(Cell(column, chip, action, start, parts, outside.total))
            ends[action] = free[chip] = start + parts.total + outside.total
        self._meet(free, by_chip)
        return Timeline(tuple(cells), by_chip, max(free.values(), default=0.0), self._passes)

    def _meet(self, free: dict[int, float], by_chip: dict[int, Parts]) -> None:
        """Let every chip wait for the last one."""
        now = max(free.values(), default=0.0)
        for chip, before in by_chip.items():
            by_chip[chip] = before.plus(Parts(bubble=now - free[chip]))
            free[chip] = now

    @property
    def _sync(self) -> float:
        return self._subject.chip.constants.external_sync

    def _parts(self, action: Action) -> Parts:
        key = action.stage_pass, action.traffic
        if key not in self._own:
            self._own[key] = self._price(*key)
        return self._own[key]

    def _price(self, stage_pass: StagePass, traffic: Traffic | None) -> Parts:
        fabric, streaming = self._subject.fabric, self._subject.staged.workload.streaming
        if traffic is not None:
            lists = streaming.loads if traffic is Traffic.LOAD else streaming.stores
            size = sum(slot_bytes(self._slots[key]) for key in lists.get(stage_pass, ()))
            return Parts(streaming=fabric.streamed(size) * self._clock)
        price = self._passes[stage_pass]
        cost = price.inside.cost
        fetched = fabric.from_host(price.from_host, cost.total / self._clock)
        host = (fetched + fabric.to_host(price.to_host)) * self._clock
        if self._subject.overlapped:
            host = max(0.0, host - cost.total)
        streamed = fabric.streamed(price.streamed) * self._clock
        gathered = self._gathered(stage_pass)
        return Parts(cost.compute, cost.exchange + gathered, cost.sync, host, streamed)

    def _gathered(self, stage_pass: StagePass) -> float:
        """Cycles to bring together weights of which every replica holds a part."""
        spec = self._subject.spec
        if stage_pass.is_update or not spec.locations.weight.sharded:
            return 0.0
        slots = self._subject.staged.graphs[stage_pass].inputs
        size = sum(slot_bytes(s) for s in slots if s.kind is Kind.PARAM)
        return self._subject.fabric.all_gather(size) * self._clock

    def _sending(self, action: Action) -> float:
        """Cycles until what an action sends to other chips has arrived."""
        key = action.stage_pass, action.traffic
        if key not in self._sent:
            size = sum(
                slot_bytes(transfer.value)
                for transfer in self._subject.staged.transfers
                if transfer.source == action.stage_pass and action.traffic is None
            )
            self._sent[key] = self._subject.fabric.sent(size) * self._clock
        return self._sent[key]

    def _reduce(self, free: dict[int, float], by_chip: dict[int, Parts]) -> None:
        """Add up the gradients of all replicas."""
        subject = self._subject
        if subject.fabric.replicas == 1:
            return
        sizes = dict.fromkeys(by_chip, 0.0)
        for stage_pass, graph in subject.staged.graphs.items():
            if stage_pass.is_update:
                sizes[stage_pass.stage] += sum(
                    slot_bytes(s) for s in graph.inputs if s.kind in (Kind.ACCUM, Kind.GRADIENT)
                )
        for chip, before in by_chip.items():
            cycles = subject.fabric.all_reduce(sizes[chip]) * self._clock
            by_chip[chip] = before.plus(Parts(exchange=cycles, sync=self._sync))
            free[chip] += cycles + self._sync
        self._meet(free, by_chip)
