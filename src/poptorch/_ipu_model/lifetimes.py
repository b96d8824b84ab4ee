"""What comes to a chip and leaves it with each action, by the rules of the ``staged`` backend.

Tensors that come and go with the same actions are one bundle: a layer leaves dozens of activations
for its backward pass, and thousands of actions go by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .._ir.blocks import StagePass
from .._ir.plan import PER_MICRO_BATCH, Staged
from .._ir.schedule import Traffic
from .._ir.slots import Kind, Slot
from .sizes import slot_bytes

Event = tuple[StagePass, Traffic | None]
Place = tuple[int, str]


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tensors of a chip that come and go together.

    Attributes:
        name: its number.
        per_micro_batch: whether every micro-batch has its own.
        sizes: bytes by slot key.
        total: of them.
    """

    name: int
    per_micro_batch: bool
    sizes: Mapping[str, float]
    total: float


@dataclass(frozen=True, eq=False)
class Effect:
    """What one action does to the memory of the chips.

    Attributes:
        brought: comes to its chip from outside, and is there while it runs.
        made: stays on its chip when it is done.
        sent: arrives on other chips after the column, with the chip.
        gone: leaves its chip: names, and whether every micro-batch has its own.
    """

    brought: tuple[Bundle, ...]
    made: tuple[Bundle, ...]
    sent: tuple[tuple[int, Bundle], ...]
    gone: tuple[tuple[int, bool], ...]


def effects(
    staged: Staged, slots: Mapping[str, Slot], size: Callable[[Slot], float], parked: set[str]
) -> dict[Event, Effect]:
    """Return what every action of a schedule does, by its pass and traffic.

    Args:
        staged: the program.
        slots: its slots by key.
        size: bytes that a slot takes.
        parked: keys of values that wait elsewhere than on a chip.
    """
    rows = staged.schedule.rows.values()
    events = dict.fromkeys((a.stage_pass, a.traffic) for row in rows for a in row if a is not None)
    reader = _Reader(staged, slots, size, parked)
    lists = {event: reader.lists(*event) for event in events}
    touched: dict[Place, list[tuple[Event, str]]] = defaultdict(list)
    for event, one in lists.items():
        for what, places in vars(one).items():
            for place in places:
                touched[place].append((event, what))
    numbers: dict[object, int] = {}
    bundle_of = {
        place: numbers.setdefault(
            (place[0], tuple(history), slots[place[1]].kind in PER_MICRO_BATCH), len(numbers)
        )
        for place, history in touched.items()
    }

    def bundled(sizes: Mapping[Place, float]) -> dict[int, tuple[int, Bundle]]:
        parts: dict[int, dict[Place, float]] = defaultdict(dict)
        for place, each in sizes.items():
            parts[bundle_of[place]][place] = each
        made = {}
        for name, part in parts.items():
            (chip, key), *_ = part
            of = {key: each for (_, key), each in part.items()}
            kind = slots[key].kind
            made[name] = chip, Bundle(name, kind in PER_MICRO_BATCH, of, sum(of.values()))
        return made

    return {
        event: Effect(
            tuple(bundle for _, bundle in bundled(one.brought).values()),
            tuple(bundle for _, bundle in bundled(one.made).values()),
            tuple(bundled(one.sent).values()),
            tuple({bundle_of[p]: slots[p[1]].kind in PER_MICRO_BATCH for p in one.gone}.items()),
        )
        for event, one in lists.items()
    }


@dataclass
class _Lists:
    """An Effect, tensor by tensor: bytes by chip and key."""

    brought: dict[Place, float]
    made: dict[Place, float]
    sent: dict[Place, float]
    gone: dict[Place, float]


class _Reader:
    """Reads off a program what its actions keep and forget."""

    def __init__(
        self, staged: Staged, slots: Mapping[str, Slot], size: Callable[[Slot], float],
        parked: set[str],
    ) -> None:  # fmt: skip
        self._staged, self._slots, self._size, self._parked = staged, slots, size, parked
        self._read_on = set(staged.last_readers())
        self._forget, self._targets = staged.forgotten(), staged.targets()

    def lists(self, stage_pass: StagePass, traffic: Traffic | None) -> _Lists:
        """Return what one action does."""
        streaming, chip = self._staged.workload.streaming, self._staged.workload.chip_of(stage_pass)
        if traffic is Traffic.LOAD:
            keys: Iterable[str] = streaming.loads.get(stage_pass, ())
            loaded = {(chip, key): float(slot_bytes(self._slots[key])) for key in keys}
            return _Lists(loaded, {}, {}, {})
        if traffic is Traffic.STORE:
            keys = streaming.stores.get(stage_pass, ())
            return _Lists({}, {}, {}, {(chip, key): 0.0 for key in keys})
        graph = self._staged.graphs[stage_pass]
        brought = {
            (chip, slot.key): self._size(slot)
            for slot in graph.inputs
            if slot.kind is Kind.BATCH or slot.key in self._parked
        }
        values = [slot for slot in graph.outputs if slot.kind is Kind.VALUE]
        made = {
            (chip, slot.key): self._size(slot)
            for slot in values
            if (chip, slot.key) in self._read_on and slot.key not in self._parked
        }
        sent = {
            (to, slot.key): self._size(slot) for slot in values for to in self._targets[slot.key]
        }
        parked = [slot.key for slot in graph.inputs if slot.key in self._parked]
        keys = (*self._forget[stage_pass], *streaming.drops.get(stage_pass, ()), *parked)
        return _Lists(brought, made, sent, {(chip, key): 0.0 for key in keys})
