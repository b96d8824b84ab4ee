"""Numbers, flags and texts that modules hold: constants of the program, whatever they become.

An annealed temperature, another dropout rate or weight of a loss term would have no effect, without
a word.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import nn

from .._base import log

_PLAIN = (bool, int, float, str)
_FOLLOWED = "training"  # a program for each mode
_IN_TURN = 4  # layers that one call looks at


class Attributes:
    """What a model's modules held when it was compiled; warns once that it is not that any more.

    Names that begin with an underscore are left out, as those of libraries, and so is what
    ``forward`` itself changes, as a counter.

    Args:
        module: what is compiled.
        users: the user's module, of which that is a copy that shares the layers.
        trained: whether they are one to the user; of inference each wrapper has a copy.
    """

    def __init__(self, module: nn.Module, users: nn.Module, trained: bool) -> None:
        if trained:
            module.__dict__.update(_plain(users.__dict__))
        owners = [("", users), *module.named_modules()]
        self._held = [
            (path, type(owner), owner.__dict__, _plain(owner.__dict__)) for path, owner in owners
        ]
        self._remedy = (
            "call destroy() on the executor, so that the next call compiles anew"
            if trained
            else "wrap the model again"
        )
        self._said = False
        self.settle()

    def settle(self) -> None:
        """From now on look at what is as it was before ``forward`` was captured."""
        set_inside = {
            (path, name)
            for path, _, own, held in self._held[1:]
            for name, value in held.items()
            if not _same(own, name, value)
        }
        steady = [
            (path, kind, own, {n: v for n, v in held.items() if (path, n) not in set_inside})
            for path, kind, own, held in self._held
        ]
        self._held = steady
        looks = [(path, _Look(own, held)) for path, _, own, held in steady if held]
        model = [look for path, look in looks if not path]
        layers = [look for path, look in looks if path]
        groups = [layers[start : start + _IN_TURN] for start in range(0, len(layers), _IN_TURN)]
        self._turns = itertools.cycle([model + group for group in groups or [[]]])

    def say(self) -> None:
        """Warn, once, if something changed; for every call.

        Each looks at the model itself and at a few of its layers.
        """
        if self._said:
            return
        for look in next(self._turns):
            if look.differs():
                break
        else:
            return
        self._said = True
        changed = {
            f"{kind.__name__.removeprefix('Poptorch')}.{name}"
            f"{f' of {path}' if path else ''} was {value!r} and is {own.get(name)!r}": None
            for path, kind, own, held in self._held
            for name, value in held.items()
            if not _same(own, name, value)
        }
        log.python.warning(
            "Attributes of the model changed after it was compiled (%s): they are constants of "
            "the program, which goes on with those from before. Pass what changes to forward as a "
            "tensor, or %s",
            ", ".join(list(changed)[:5]) + (", ..." if len(changed) > 5 else ""),
            self._remedy,
        )


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, flags or texts."""
    return {
        name: value
        for name, value in own.items()
        if type(value) in _PLAIN and name != _FOLLOWED and not name.startswith("_")
    }


def _same(own: dict[str, Any], name: str, value: Any) -> bool:
    now = own.get(name)
    return now is value or (type(now) is type(value) and bool(now == value))


class _Look:
    """One look at attributes of a module."""

    def __init__(self, own: dict[str, Any], held: dict[str, Any]) -> None:
        self._own, self._read = own, operator.itemgetter(*held)
        self._expected = self._read(held)

    def differs(self) -> bool:
        """Tell whether some are not what they were."""
        try:
            return bool(self._read(self._own) != self._expected)
        except Exception:  # of many kinds: one is gone, or a tensor now
            return True
