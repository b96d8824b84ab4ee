"""What can be frozen: one flag, carried over nested groups, and deep copies that are unfrozen.

Source: PopTorch user guide, "Options".
"""

from __future__ import annotations

import copy
from typing import Any, Self

from .._base.errors import InvalidAttribute


class Freezable:
    """An object whose writers call ``_check_writable`` first.

    The flag lives in the plain instance dictionary, so that it survives pickling and does not
    go through the subclasses' own attribute rules.
    """

    def _freeze(self) -> None:
        """Forbid writes to this object and to every group nested in it."""
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        """Allow writes again, nested groups included."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        vars(self)["_is_frozen"] = frozen
        for child in self._nested():
            child._set_frozen(frozen)

    def _nested(self) -> list[Freezable]:
        return [child for child in vars(self).values() if isinstance(child, Freezable)]

    def _check_writable(self, name: str) -> None:
        if vars(self).get("_is_frozen", False):
            raise InvalidAttribute(
                "Can't modify frozen Options",
                got=f"a write of {name} after the options were given to a model or a DataLoader",
                fix="set options before that, or change a copy: options.clone()",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        new._unfreeze()
        return new

    def __copy__(self) -> Self:
        """Copy deeply: a copy that shared half of its state would be a trap."""
        return copy.deepcopy(self)
