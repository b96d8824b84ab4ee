"""Find where any sequence repeats itself, as the layers of a model do. The callers decide which
elements are equal.

Two callers handle equal layers only once: the compiler for CPUs, which compiles them once, and
exported code, which writes them as one function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np


class Stretch(NamedTuple):
    """Elements, each of which is equal to the one ``period`` elements later, up to ``end``."""

    start: int
    period: int
    end: int

    @property
    def saved(self) -> int:
        """Return how many elements are left out if each period is handled once."""
        return ((self.end - self.start) // self.period - 1) * self.period


class Repetition(Protocol):
    """What a caller makes of a stretch, or of a part of it."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


Found = TypeVar("Found", bound=Repetition)


def repetitions(
    elements: Sequence[Hashable],
    choose: Callable[[list[Stretch]], Found | None],
    shortest: int = 1,
) -> list[Found]:
    """Return all repetitions, in order: each is chosen from what the earlier choices left.

    Args:
        elements: equal elements represent the same work.
        choose: picks a repetition of some stretches, the one that saves most first; None if no
            stretch is worth it.
        shortest: the smallest period.
    """
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(each, len(numbers)) for each in elements])
    found: list[Found] = []
    waiting = [(0, len(kinds))]
    while waiting:
        low, high = waiting.pop()
        chosen = choose(_stretches(kinds, low, high, shortest))
        if chosen is not None:
            found.append(chosen)
            waiting += [(low, chosen.start), (chosen.end, high)]
    return sorted(found, key=lambda each: each.start)


def _stretches(kinds: np.ndarray, low: int, high: int, shortest: int) -> list[Stretch]:
    found = []
    own = kinds[low:high]
    for period in range(shortest, len(own) // 2 + 1):
        same = np.concatenate(([False], own[:-period] == own[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= period:
                found.append(Stretch(low + int(start), period, low + int(end) + period))
    return sorted(found, key=lambda each: (-each.saved, each.period))
