"""Compute the times of a schedule's actions, in the order in which the ``staged`` backend
runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .._ir import schedule
from .._ir.block_labels import StagePass
from .._ir.schedule import Traffic
from .._ir.slots import RETURNED, Kind
from .cycles import FREE, Cost, slot_bytes
from .parts import TimedAction
from .pass_cost import PassCost
from .subject import Subject

_NAMES = {"host": "host link", "streaming": "streaming memory", "call": "host call"}
_RESULTS = (*RETURNED, Kind.ANCHOR)


class PassPrice(NamedTuple):
    """What one run of a pass costs on its chip; bytes are for one replica."""

    inside: PassCost
    from_host: float
    to_host: float
    streamed: float  # to and from streaming memory, in addition to the schedule's loads


class Timeline(NamedTuple):
    actions: tuple[TimedAction, ...]  # in the order of the columns
    by_chip: Mapping[int, Cost]  # costs of one run of the schedule; the totals are equal
    cycles: float  # cycles of one run
    prices: Mapping[StagePass, PassPrice]


def named(cost: Cost) -> dict[str, float]:
    return {_NAMES.get(name, name): cycles for name, cycles in cost._asdict().items()}


def simulate(subject: Subject) -> Timeline:
    transferred: set[tuple[int, str]] = set()
    prices = {each: _price(each, subject, transferred) for each in subject.staged.graphs}
    return _Clock(subject, prices).run()


def _price(stage_pass: StagePass, subject: Subject, transferred: set[tuple[int, str]]) -> PassPrice:
    """Return the cost of a pass. Data from the host that chips have already is ``there``, and is
    not read again.
    """
    graph, loops = subject.staged.graphs[stage_pass], subject.spec.loops
    from_host = to_host = 0.0
    if not subject.spec.target.synthetic_data:
        chip = subject.staged.workload.chip_of(stage_pass)
        read = {(chip, s.key): slot_bytes(s) for s in graph.inputs if s.kind is Kind.BATCH}
        from_host = sum(size for name, size in read.items() if name not in transferred)
        transferred.update(read)
        to_host = sum(
            slot_bytes(slot) * subject.emit.count(slot.key, loops) / loops.micro_batches
            for slot in graph.outputs
            if slot.kind in _RESULTS
        )
    streamed = _streamed(stage_pass, subject)
    return PassPrice(subject.inside(stage_pass), from_host, to_host, streamed)


def _streamed(stage_pass: StagePass, subject: Subject) -> float:
    """Return the bytes of state from and to streaming memory, which phased strategies have actions
    for.
    """
    spec, graph = subject.spec, subject.staged.graphs[stage_pass]
    if spec.placement.phased:
        return 0.0
    moved = (s for s in (*graph.inputs, *graph.outputs) if s.is_state and subject.is_off_chip(s))
    total = sum(slot_bytes(slot) / subject.shares(slot) for slot in moved)
    if not spec.locations.activation.on_chip and not stage_pass.is_update:
        total += sum(slot_bytes(slot) for slot in subject.waiting_values(stage_pass))
    return total


class _Clock:
    def __init__(self, subject: Subject, prices: Mapping[StagePass, PassPrice]) -> None:
        self._subject, self._prices = subject, prices
        rows = subject.staged.schedule.rows
        self._free = dict.fromkeys(rows, 0.0)
        self._by_chip = dict.fromkeys(rows, FREE)
        self._slots = subject.staged.slots()

    def run(self) -> Timeline:
        staged, sync = self._subject.staged, self._subject.constants.external_sync
        free, by_chip = self._free, self._by_chip
        own: dict[tuple[StagePass, Traffic | None], tuple[Cost, dict[str, float], float]] = {}
        ends: dict[schedule.Action, float] = {}
        actions: list[TimedAction] = []
        rounds = -1
        for column, chip, action in staged.schedule.cells():
            if action.stage_pass.is_update and action.stage_pass.round > rounds:
                rounds = action.stage_pass.round
                self._meet()
                if rounds == 0:
                    self._reduce()
            key = action.stage_pass, action.traffic
            if key not in own:
                cost = self._cost(*key)
                parts = {name: cycles for name, cycles in named(cost).items() if cycles}
                own[key] = cost, parts, self._sending(*key)
            cost, parts, sent = own[key]
            needs = () if action.traffic else staged.workload.needs.get(action.stage_pass, ())
            ready = [ends[schedule.Action(need, action.micro_batch)] for need in needs]
            start = max(free[chip], *ready, 0.0)
            outside = Cost(exchange=sent, sync=sync if sent else 0.0)
            waited = Cost(bubble=start - free[chip])
            by_chip[chip] = by_chip[chip].plus(waited).plus(cost).plus(outside)
            actions.append(TimedAction(chip, column, str(action), start, parts, outside.total))
            ends[action] = free[chip] = start + cost.total + outside.total
        self._meet()
        return Timeline(tuple(actions), by_chip, max(free.values(), default=0.0), self._prices)

    def _meet(self) -> None:
        now = max(self._free.values(), default=0.0)
        for chip, before in self._by_chip.items():
            self._by_chip[chip] = before.plus(Cost(bubble=now - self._free[chip]))
            self._free[chip] = now

    def _cost(self, stage_pass: StagePass, traffic: Traffic | None) -> Cost:
        subject, clock = self._subject, self._subject.clock
        if traffic is not None:
            streaming = subject.staged.workload.streaming
            lists = streaming.loads if traffic is Traffic.LOAD else streaming.stores
            size = sum(slot_bytes(self._slots[key]) for key in lists.get(stage_pass, ()))
            return Cost(streaming=subject.streamed(size) * clock)
        price = self._prices[stage_pass]
        cost = price.inside.cost
        fetched = subject.from_host(price.from_host, cost.total / clock)
        host = (fetched + subject.to_host(price.to_host)) * clock
        if subject.overlapped:
            host = max(0.0, host - cost.total)
        streamed = subject.streamed(price.streamed) * clock
        gathered = self._gathered(stage_pass)
        return cost._replace(exchange=cost.exchange + gathered, host=host, streaming=streamed)

    def _gathered(self, stage_pass: StagePass) -> float:
        subject = self._subject
        if stage_pass.is_update or not subject.spec.locations.weight.sharded:
            return 0.0
        slots = subject.staged.graphs[stage_pass].inputs
        size = sum(slot_bytes(slot) for slot in slots if slot.kind is Kind.PARAM)
        return subject.all_gather(size) * subject.clock

    def _sending(self, stage_pass: StagePass, traffic: Traffic | None) -> float:
        size = sum(
            slot_bytes(transfer.value)
            for transfer in self._subject.staged.transfers
            if transfer.source == stage_pass and traffic is None
        )
        return self._subject.sent(size) * self._subject.clock

    def _reduce(self) -> None:
        subject = self._subject
        if subject.replicas == 1:
            return
        sizes = dict.fromkeys(self._by_chip, 0.0)
        for stage_pass, graph in subject.staged.graphs.items():
            if stage_pass.is_update:
                sizes[stage_pass.stage] += sum(
                    slot_bytes(s) for s in graph.inputs if s.kind in (Kind.ACCUM, Kind.GRADIENT)
                )
        sync = subject.constants.external_sync
        for chip, before in self._by_chip.items():
            cycles = 2 * subject.all_gather(sizes[chip]) * subject.clock
            self._by_chip[chip] = before.plus(Cost(exchange=cycles, sync=sync))
            self._free[chip] += cycles + sync
        self._meet()
