"""Find out which bytes are on which chip at what time. Values come and go as in the ``staged``
backend.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._ir.block_labels import StagePass
from .._ir.plan import PER_MICRO_BATCH, Staged
from .._ir.schedule import Action, Traffic
from .._ir.slots import Kind
from .cycles import slot_bytes
from .simulate import PassPrice
from .subject import Subject
from .work import Work

WEIGHTS, OPTIMIZER, ACCUMULATORS = "weights", "optimizer state", "accumulators"
ACTIVATIONS, TEMPORARY, CODE = "activations", "temporary", "code"
STREAMS, GAPS = "host buffers", "gaps and imbalance"
CATEGORIES = (WEIGHTS, OPTIMIZER, ACCUMULATORS, ACTIVATIONS, TEMPORARY, CODE, STREAMS, GAPS)

_STATE = {Kind.OPTSTATE: OPTIMIZER, Kind.ACCUM: ACCUMULATORS}
_LEAST = 128  # bytes of a tensor on a tile, if it has any


@dataclass(frozen=True, eq=False)
class ChipMemory:
    always: Mapping[str, float]  # by category, permanently
    peak: Mapping[str, float]  # by category, at the fullest moment
    at: Action | None  # the action at that moment
    waiting: Mapping[str, float]  # values that wait for another pass at that moment, by slot key
    state: Mapping[str, float]  # permanent values, by slot key
    live: tuple[float, ...]  # at every column of the schedule
    tiles: tuple[float, ...]  # every tile at the fullest moment; tiles for I/O are last
    # The fullest moment of each pass, with the values that wait then, as above; None means rest.
    moments: Mapping[StagePass | None, tuple[Action | None, Mapping[str, float]]]

    @property
    def bytes(self) -> float:
        return sum(self.peak.values())


def memory_of(subject: Subject, prices: Mapping[StagePass, PassPrice]) -> dict[int, ChipMemory]:
    return _Accountant(subject, prices).run()


_Name = tuple[str, int]  # slot key and micro-batch


class _Effect(NamedTuple):
    brought: Sequence[str] = ()  # loaded to its chip from outside, and present while it runs
    made: Sequence[str] = ()  # stays on its chip afterwards
    sent: Sequence[tuple[int, str]] = ()  # arrives on other chips after the column
    gone: Sequence[str] = ()  # leaves its chip


def _effects(staged: Staged, parked: set[str]) -> Callable[[StagePass, Traffic | None], _Effect]:
    """Return the effects of actions. Keys in ``parked`` name values that wait outside of chips."""
    kept, forgotten, targets = set(staged.last_readers()), staged.forgotten(), staged.targets()
    streaming = staged.workload.streaming

    @functools.cache
    def effect(stage_pass: StagePass, traffic: Traffic | None) -> _Effect:
        if traffic is Traffic.LOAD:
            return _Effect(brought=streaming.loads.get(stage_pass, ()))
        if traffic is Traffic.STORE:
            return _Effect(gone=streaming.stores.get(stage_pass, ()))
        graph, chip = staged.graphs[stage_pass], staged.workload.chip_of(stage_pass)
        read_back = [slot.key for slot in graph.inputs if slot.key in parked]
        values = [slot.key for slot in graph.outputs if slot.kind is Kind.VALUE]
        return _Effect(
            [s.key for s in graph.inputs if s.kind is Kind.BATCH or s.key in parked],
            [key for key in values if (chip, key) in kept and key not in parked],
            [(to, key) for key in values for to in targets[key]],
            (*forgotten[stage_pass], *streaming.drops.get(stage_pass, ()), *read_back),
        )

    return effect


class _Held:
    def __init__(self) -> None:
        self.sizes: dict[_Name, float] = {}
        self.total = 0.0
        self.live: list[float] = []
        # The most bytes while each pass runs, with the action and the values that wait then; None
        # means rest.
        self.moments: dict[StagePass | None, tuple[float, Action | None, dict[_Name, float]]]
        self.moments = {None: (0.0, None, {})}

    def put(self, name: _Name, size: float) -> None:
        self.total += size - self.sizes.pop(name, 0.0)
        self.sizes[name] = size

    def run(self, action: Action | None, extra: float) -> None:
        """Record what is present in a column. The values that an action computes are part of its
        ``extra``.
        """
        self.live.append(self.total + extra)
        stage_pass = None if action is None else action.stage_pass
        if stage_pass not in self.moments or self.live[-1] > self.moments[stage_pass][0]:
            self.moments[stage_pass] = self.live[-1], action, dict(self.sizes)


def _by_key(sizes: Mapping[_Name, float]) -> dict[str, float]:
    waiting: dict[str, float] = defaultdict(float)
    for (key, _), size in sizes.items():
        waiting[key] += size
    return waiting


class Tiles:
    """The bytes on every tile of a chip that computes.

    Weights, and tensors that belong to them, are stored in blocks, as the forward product that
    reads them is spread. Source: PopLibs (MIT), poplin ConvOptions (startTileMultiplier), poputil
    TileMapping.
    """

    def __init__(self, count: int) -> None:
        self.bytes = np.zeros(count)
        self._next = 0

    def place_blocks(self, size: float, share: float) -> None:
        """Add a tensor in blocks that are a share of it, from the first tile on."""
        whole = int(1 / share)
        if whole >= len(self.bytes):
            self.bytes += size / len(self.bytes)
            return
        self.bytes[:whole] += size * share
        self.bytes[whole] += size * (1 - whole * share)

    def distribute(self, size: float) -> None:
        """Add a tensor that is divided over successive tiles, with at least 128 bytes on each."""
        count = len(self.bytes)
        if size >= count * _LEAST:
            self.bytes += size / count
            return
        whole = int(size // _LEAST)
        self.bytes[(self._next + np.arange(whole)) % count] += _LEAST
        last = (self._next + whole) % count
        self.bytes[last] += size - whole * _LEAST
        self._next = (last + 1) % count


class _Accountant:
    def __init__(self, subject: Subject, prices: Mapping[StagePass, PassPrice]) -> None:
        self._subject, self._prices = subject, prices
        self._staged, self._slots = subject.staged, subject.staged.slots()
        seeds = self._summed_gradients().union(*(each.seeded for each in subject.passes.values()))
        self._sizes = {k: 0 if k in seeds else slot_bytes(s) for k, s in self._slots.items()}
        self._effect = _effects(self._staged, self._off_chip_values())

    def run(self) -> dict[int, ChipMemory]:
        schedule = self._staged.schedule
        held = {chip: _Held() for chip in schedule.rows}
        for column in range(schedule.columns):
            sent: list[tuple[int, str, Action]] = []
            for chip, row in schedule.rows.items():
                action, mine, extra = row[column], held[chip], 0.0
                if action is not None:
                    if action.traffic is None:  # otherwise nothing runs
                        extra = self._prices[action.stage_pass].inside.bytes
                    effect = self._effect(action.stage_pass, action.traffic)
                    for key in effect.brought:
                        whole = action.traffic is Traffic.LOAD
                        size = slot_bytes(self._slots[key]) if whole else self._sizes[key]
                        mine.put(self._name(key, action), size)
                mine.run(action, extra)
                if action is not None:
                    for key in effect.made:
                        mine.put(self._name(key, action), self._sizes[key])
                    for key in effect.gone:
                        mine.total -= mine.sizes.pop(self._name(key, action), 0.0)
                    sent += [(to, key, action) for to, key in effect.sent]
            for to, key, action in sent:
                held[to].put(self._name(key, action), self._sizes[key])
        return {chip: self._summary(chip, own) for chip, own in held.items()}

    def _name(self, key: str, action: Action) -> _Name:
        own = self._slots[key].kind in PER_MICRO_BATCH  # every micro-batch has its own
        return key, action.micro_batch if own else 0

    def _summed_gradients(self) -> set[str]:
        """Return parts of one weight's gradient from several stages. Each is added when it is
        computed.
        """
        sent = {transfer.value.key for transfer in self._staged.transfers}
        shapes = {(s.shape, s.dtype) for s in self._slots.values() if s.kind is Kind.PARAM}
        return {
            slot.key
            for each, graph in self._staged.graphs.items()
            if each.backward
            for slot in graph.outputs
            if slot.kind is Kind.VALUE and (slot.shape, slot.dtype) in shapes
            and len(slot.shape) > 1 and slot.key not in sent
        }  # fmt: skip

    def _off_chip_values(self) -> set[str]:
        """Return values that wait for their backward pass in streaming memory, in strategies
        without phases.
        """
        spec = self._subject.spec
        if spec.placement.phased or spec.locations.activation.on_chip:
            return set()
        passes = [p for p in self._staged.graphs if not p.backward and not p.is_update]
        return {slot.key for p in passes for slot in self._subject.waiting_values(p)}

    def _state(self, chip: int) -> dict[str, float]:
        homes = self._staged.homes
        slots_on_chip = [
            self._slots[key] for key in homes if chip in homes[key] and key in self._slots
        ]
        return {
            slot.key: slot_bytes(slot) / self._subject.shares(slot)
            for slot in slots_on_chip
            if not self._subject.is_off_chip(slot)
        }

    def _summary(self, chip: int, held: _Held) -> ChipMemory:
        subject, state = self._subject, self._state(chip)
        prices = self._prices.items()
        own = [price for each, price in prices if self._staged.workload.chip_of(each) == chip]
        always = dict.fromkeys(CATEGORIES, 0.0)
        for key, size in state.items():
            always[_STATE.get(self._slots[key].kind, WEIGHTS)] += size
        c, tiles = subject.constants, subject.chip.tiles
        steps = sum(w.all_steps for w in frozenset[Work]().union(*(p.inside.works for p in own)))
        always[CODE] = tiles * (c.code_base + c.code_step * steps)
        io_tiles = subject.chip.kind.tiles - tiles
        always[STREAMS] = max((price.from_host + price.to_host for price in own), default=0.0)
        always[STREAMS] += io_tiles * subject.chip.kind.tile_bytes
        moments = {each: (at, _by_key(sizes)) for each, (_, at, sizes) in held.moments.items()}
        fullest = max(held.moments, key=lambda each: held.moments[each][0])
        peak, (action, waiting) = dict(always), moments[fullest]
        for key, size in waiting.items():
            kind = self._slots[key].kind
            usual = WEIGHTS if kind is Kind.PARAM else ACTIVATIONS
            peak[_STATE.get(kind, usual)] += size
        if action is not None and action.traffic is None:
            inside = self._prices[action.stage_pass].inside
            peak[ACTIVATIONS] += inside.values
            peak[TEMPORARY] += inside.temporary
        laid = self._laid(state, own)
        self._tiles(laid, always)
        by_tile = self._tiles(laid, peak)
        base, factor = sum(always.values()), 1 + c.gaps
        live = tuple(base + factor * size for size in held.live)
        return ChipMemory(always, peak, action, waiting, state, live, by_tile, moments)

    def _laid(self, state: Mapping[str, float], prices: Iterable[PassPrice]) -> np.ndarray:
        blocks = {path: share for own in prices for path, share in own.inside.blocks.items()}
        tiles = Tiles(self._subject.chip.tiles)
        for key, size in state.items():
            share = blocks.get(self._slots[key].weight)
            if share is not None and size == slot_bytes(self._slots[key]):
                tiles.place_blocks(size, share)
            else:  # each replica has a flat part of what replicas share
                tiles.distribute(size)
        return tiles.bytes

    def _tiles(self, state: np.ndarray, totals: dict[str, float]) -> tuple[float, ...]:
        """Return the bytes of tiles. The excess of the fullest tile becomes a category of
        ``totals``.
        """
        kind = self._subject.chip.kind
        io_tiles = kind.tiles - len(state)
        reserved = io_tiles * kind.tile_bytes
        rest = (sum(totals.values()) - reserved - sum(state.tolist())) / len(state)
        computing = ((1 + self._subject.constants.gaps) * (state + rest)).tolist()
        totals[GAPS] = max(computing) * len(state) + reserved - sum(totals.values())
        return *computing, *(io_tiles * [float(kind.tile_bytes)])
