"""Define ``ChangeCheck``, and write the one warning about all values on the host that changed after
they were compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..._base import log, nested_values

DESTROY = (
    "call destroy() on the wrapped model, so that the next call compiles the model as it is now"
)
WRAP = "wrap the model again, after destroy()"


@dataclasses.dataclass(eq=False)
class ChangeCheck:
    """Whether a value that was compiled into a program has changed on the host."""

    read: Callable[[], Any]  # returns the current value
    # describes the changes; yields nothing if the value is equivalent
    changes: Callable[[Any], Iterable[str]]
    remedy: str  # what the user can do so that a change takes effect
    # copies the value, so that later changes do not affect the copy
    keep: Callable[[Any], Any] = copy.copy
    # compares the current value with the expected one, quickly
    compare: Callable[[Any, Any], bool] = operator.eq
    expected: Any = dataclasses.field(init=False)
    reported: bool = False
    of_layers: bool = False  # whether a program is not that of the model as it is now

    def __post_init__(self) -> None:
        self.accept()

    def accept(self) -> None:
        self.expected = self.keep(self.read())

    def holds(self) -> bool:
        """Compare quickly. False may also mean a different but equivalent value."""
        try:
            return bool(self.compare(self.read(), self.expected))
        # errors of many types, because something no longer exists or is a tensor now
        except Exception:
            return False


def replaced_layers(checks: Iterable[ChangeCheck]) -> list[str]:
    """Return the layers that the model has now and that were not compiled."""
    failed = (check for check in checks if check.of_layers and not check.holds())
    return [each for check in failed for each in check.changes(check.expected)]


def warn_of_changes(checks: Iterable[ChangeCheck]) -> None:
    """Report everything that changed in one warning, and what one check finds only once."""
    failed = [check for check in checks if not (check.reported or check.holds())]
    if not failed:
        return
    changes_by_remedy: dict[str, list[str]] = {}
    for check in failed:
        changes = list(check.changes(check.expected))
        if changes:
            check.reported = True
            changes_by_remedy.setdefault(check.remedy, []).extend(dict.fromkeys(changes))
        else:
            check.accept()
    if changes_by_remedy:
        log.python.warning(
            "The compiled program does not follow what changed on the host: %s",
            ". ".join(f"{shorten(texts)}: {remedy}" for remedy, texts in changes_by_remedy.items()),
        )


def shorten(texts: Sequence[str]) -> str:
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")


def is_same(now: Any, value: Any) -> bool:
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if type(value) is torch.Tensor:
        return now.dtype is value.dtype and not now.is_meta and torch.equal(now, value)
    if type(value) is dict:
        return now.keys() == value.keys() and all(is_same(now[key], value[key]) for key in value)
    if type(value) in (list, tuple):
        return len(now) == len(value) and all(map(is_same, now, value))
    return nested_values.same_constant(value, now)
