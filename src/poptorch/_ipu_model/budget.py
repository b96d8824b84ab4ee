"""Two profiles side by side, and whether the later one needs more than a budget allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._base.errors import Error
from .._base.tables import table

Profile = Mapping[str, Any]
BUDGETS = ("memory", "cycles")


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        name: of the figure.
        before, after: its values; for all of them less is better, but for the items per second.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """How much more it is, as a share of what it was."""
        if self.before == self.after:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")


def compare(before: Profile, after: Profile) -> list[Change]:
    """Return the figures of two profiles: memory of the fullest chip, cycles, their parts."""
    old, new = _figures(before), _figures(after)
    return [Change(name, old.get(name, 0.0), new.get(name, 0.0)) for name in {**old, **new}]


def _figures(profile: Profile) -> dict[str, float]:
    priced = profile["estimated"]
    fullest = max(priced["chips"], key=lambda chip: sum(chip["peak"].values()))
    return {
        "memory": sum(fullest["peak"].values()),
        "cycles": priced["cycles"],
        "items per second": priced["items_per_second"],
        **{f"memory: {name}": size for name, size in fullest["peak"].items()},
    }


def parse(text: str) -> dict[str, float]:
    """Return the shares that a text like ``memory=3%,cycles=1%`` allows.

    Raises:
        Error: it says something else.
    """
    allowed = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*%\s*", part)
        if match is None or match[1] not in BUDGETS:
            raise Error("That is no budget", got=repr(part), fix="memory=3%,cycles=1%")
        allowed[match[1]] = float(match[2]) / 100
    return allowed


def exceeded(changes: list[Change], allowed: Mapping[str, float]) -> list[Change]:
    """Return the figures that grew by more than is allowed."""
    return [each for each in changes if each.change > allowed.get(each.name, float("inf"))]


def text(changes: list[Change]) -> str:
    """Return a table of the figures."""
    head = ["figure", "before", "now", "change"]
    rows = [[c.name, f"{c.before:,.0f}", f"{c.after:,.0f}", f"{c.change:+.1%}"] for c in changes]
    return "\n".join(table([head, *rows]))
