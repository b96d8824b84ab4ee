"""Which bytes are on which chip when: liveness over the actions of a schedule.

State is always there. What waits for another pass comes and goes with the actions, by the rules by
which the ``staged`` backend keeps and forgets tensors; on top comes what the running pass needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .._ir.blocks import StagePass
from .._ir.schedule import Action
from .._ir.slots import Kind, Slot
from .lifetimes import Bundle, Effect, effects
from .priced import PassPrice, Subject, off_chip, shares, waiting_values
from .sizes import slot_bytes
from .tiles import Tiles

WEIGHTS, OPTIMIZER, ACCUMULATORS = "weights", "optimizer state", "accumulators"
ACTIVATIONS, TEMPORARY, CODE = "activations", "temporary", "code"
STREAMS, GAPS = "host buffers", "gaps and imbalance"
CATEGORIES = (WEIGHTS, OPTIMIZER, ACCUMULATORS, ACTIVATIONS, TEMPORARY, CODE, STREAMS, GAPS)

_OF_KIND = {Kind.OPTSTATE: OPTIMIZER, Kind.ACCUM: ACCUMULATORS}

Name = tuple[int, int]
"""Number of a bundle, and the micro-batch."""


@dataclass(frozen=True, eq=False)
class ChipMemory:
    """The memory of one chip.

    Attributes:
        always: bytes by category that are there all the time.
        peak: bytes by category at the fullest moment.
        at: the action of that moment.
        waiting: what waits for another pass at that moment: bytes by slot key.
        state: bytes by slot key of what is always there.
        live: bytes at every column of the schedule.
        tiles: bytes of every tile at the fullest moment.
    """

    always: Mapping[str, float]
    peak: Mapping[str, float]
    at: Action | None
    waiting: Mapping[str, float]
    state: Mapping[str, float]
    live: tuple[float, ...]
    tiles: tuple[float, ...]


def memory_of(subject: Subject, passes: Mapping[StagePass, PassPrice]) -> dict[int, ChipMemory]:
    """Return the memory of every chip."""
    return _Accountant(subject, passes).run()


class _Held:
    """What waits on a chip, and how much it is."""

    def __init__(self) -> None:
        self.bundles: dict[Name, Bundle] = {}
        self.total = 0.0

    def put(self, name: Name, bundle: Bundle) -> None:
        """Add something, or replace it."""
        self.drop(name)
        self.bundles[name] = bundle
        self.total += bundle.total

    def drop(self, name: Name) -> None:
        """Take something away, if it is there."""
        before = self.bundles.pop(name, None)
        if before is not None:
            self.total -= before.total


class _Accountant:
    """Keeps the books of all chips while the actions go by."""

    def __init__(self, subject: Subject, passes: Mapping[StagePass, PassPrice]) -> None:
        self._subject, self._passes = subject, passes
        self._staged = subject.staged
        workload = self._staged.workload
        self._slots = {
            slot.key: slot
            for graph in self._staged.graphs.values()
            for slot in (*graph.inputs, *graph.outputs)
        }
        seeds = {key for each in self._staged.graphs for key in subject.known.seeded(each)}
        seeds |= self._summed_gradients()
        self._effects = effects(
            self._staged, self._slots,
            lambda slot: 0.0 if slot.key in seeds else float(slot_bytes(slot)),
            self._off_chip_values(),
        )  # fmt: skip
        self._state = {chip: self._state_of(chip) for chip in workload.chips}
        self._fixed = {chip: self._always(chip) for chip in workload.chips}
        self._laid = {chip: self._lay(chip) for chip in workload.chips}

    def run(self) -> dict[int, ChipMemory]:
        """Go through the schedule."""
        schedule = self._staged.schedule
        held = {chip: _Held() for chip in schedule.rows}
        best: dict[int, tuple[float, Action | None, dict[Name, Bundle]]] = {
            chip: (0.0, None, {}) for chip in schedule.rows
        }
        live: dict[int, list[float]] = {chip: [] for chip in schedule.rows}
        for column in range(schedule.columns):
            sent: list[tuple[int, Name, Bundle]] = []
            for chip, row in schedule.rows.items():
                action, mine, extra = row[column], held[chip], 0.0
                if action is not None:
                    effect = self._effects[action.stage_pass, action.traffic]
                    extra = self._during(action)
                    new = [e for e in effect.brought if _name(e, action) not in mine.bundles]
                    most = mine.total + extra + sum(each.total for each in new)
                    if most > best[chip][0]:
                        best[chip] = (most, action, dict(mine.bundles))
                    _do(action, effect, mine, sent)
                live[chip].append(mine.total + extra)
            for chip, name, bundle in sent:
                held[chip].put(name, bundle)
        return {chip: self._summary(chip, *best[chip], live[chip]) for chip in schedule.rows}

    def _during(self, action: Action) -> float:
        """Bytes that an action needs while it runs."""
        if action.traffic is not None:
            return 0.0
        return self._passes[action.stage_pass].inside.transient.bytes

    def _summed_gradients(self) -> set[str]:
        """Parts of the gradient of a weight that several stages of its chip use.

        They are added to the accumulator when they are there, whichever pass that is.
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
        """Values that wait for their backward pass in streaming memory, in unphased strategies."""
        spec = self._subject.spec
        if spec.placement.phased or spec.locations.activation.on_chip:
            return set()
        passes = [p for p in self._staged.graphs if not p.backward and not p.is_update]
        return {s.key for p in passes for s in waiting_values(p, self._subject)}

    def _state_of(self, chip: int) -> dict[str, float]:
        """Bytes of the state that rests on a chip, by key."""
        locations = self._subject.spec.locations
        return {
            key: slot_bytes(self._slots[key]) / shares(self._slots[key], self._subject)
            for key, homes in self._staged.homes.items()
            if chip in homes and key in self._slots and not off_chip(self._slots[key], locations)
        }

    def _always(self, chip: int) -> dict[str, float]:
        c, tiles = self._subject.chip.constants, self._subject.chip.tiles
        totals = dict.fromkeys(CATEGORIES, 0.0)
        for key, size in self._state[chip].items():
            totals[_OF_KIND.get(self._slots[key].kind, WEIGHTS)] += size
        own = [p for each, p in self._passes.items() if self._staged.workload.chip_of(each) == chip]
        steps = sum(work.all_steps for work in frozenset().union(*(p.inside.works for p in own)))
        totals[CODE] = tiles * (c.code_base + c.code_step * steps)
        totals[STREAMS] = max((p.from_host + p.to_host for p in own), default=0.0)
        io_tiles = self._subject.chip.kind.tiles - tiles
        totals[STREAMS] += io_tiles * self._subject.chip.kind.tile_bytes
        return totals

    def _summary(
        self,
        chip: int,
        most: float,
        action: Action | None,
        held: Mapping[Name, Bundle],
        live: list[float],
    ) -> ChipMemory:
        always = self._fixed[chip]
        peak = dict(always)
        there = dict(held)
        if action is not None:
            brought = self._effects[action.stage_pass, action.traffic].brought
            there = {_name(each, action): each for each in brought} | there
        waiting = Counter[str]()
        for bundle in there.values():
            for key, size in bundle.sizes.items():
                waiting[key] += size  # type: ignore[assignment]
                peak[_OF_KIND.get(self._slots[key].kind, _dynamic(self._slots[key]))] += size
        if action is not None and action.traffic is None:
            transient = self._passes[action.stage_pass].inside.transient
            peak[ACTIVATIONS] += transient.values
            peak[TEMPORARY] += transient.temporary
        fixed = dict(always)
        self._tiles(chip, fixed)
        tiles = self._tiles(chip, peak)
        base, factor = sum(fixed.values()), 1 + self._subject.chip.constants.gaps
        curve = tuple(base + factor * size for size in live)
        return ChipMemory(fixed, peak, action, waiting, self._state[chip], curve, tiles)

    def _lay(self, chip: int) -> list[float]:
        """Bytes of the state on every tile that computes."""
        own = [p for each, p in self._passes.items() if self._staged.workload.chip_of(each) == chip]
        blocks = {path: share for each in own for path, share in each.inside.blocks.items()}
        tiles = Tiles(self._subject.chip.tiles)
        for key, size in self._state[chip].items():
            share = blocks.get(self._slots[key].weight)
            if share is not None and size == slot_bytes(self._slots[key]):
                tiles.lay(size, share)
            else:  # of what replicas share each has a flat part
                tiles.deal(size)
        return tiles.bytes()

    def _tiles(self, chip: int, totals: dict[str, float]) -> tuple[float, ...]:
        """Spread bytes over the tiles; what the fullest has more than others counts for all.

        Args:
            chip: whose they are.
            totals: by category; gets that of gaps and imbalance.

        Returns:
            Bytes of every tile, those for I/O last.
        """
        subject, state = self._subject, self._laid[chip]
        io_tiles = subject.chip.kind.tiles - len(state)
        reserved = io_tiles * subject.chip.kind.tile_bytes
        rest = (sum(totals.values()) - reserved - sum(state)) / len(state)
        factor = 1 + subject.chip.constants.gaps
        computing = [factor * (size + rest) for size in state]
        totals[GAPS] = max(computing) * len(state) + reserved - sum(totals.values())
        return *computing, *(io_tiles * [float(subject.chip.kind.tile_bytes)])


def _dynamic(slot: Slot) -> str:
    return WEIGHTS if slot.kind is Kind.PARAM else ACTIVATIONS


def _name(bundle: Bundle, action: Action) -> Name:
    return bundle.name, action.micro_batch if bundle.per_micro_batch else 0


def _do(action: Action, effect: Effect, held: _Held, sent: list[tuple[int, Name, Bundle]]) -> None:
    for bundle in effect.brought:
        held.put(_name(bundle, action), bundle)
    for bundle in effect.made:
        held.put(_name(bundle, action), bundle)
    sent += [(chip, _name(bundle, action), bundle) for chip, bundle in effect.sent]
    for name, per_micro_batch in effect.gone:
        held.drop((name, action.micro_batch if per_micro_batch else 0))
