"""Labels and indices among the inputs, looked at before a call changes anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch

from .._base import source
from .._base.errors import Error
from .._ir.indices import Range
from .._ir.program import State
from .._ir.slots import Kind

_COMPLAINT = re.compile("out of (range|bounds)")


class Indices:
    """What the inputs of one compilation must lie in.

    Args:
        ranges: of each input that is an index; none where the check is off.
        paths: of the inputs.
        premises: ranges of inputs that indices are made of, asked for when a call has failed.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        paths: Sequence[str],
        premises: Callable[[], Iterable[Range]] = tuple,
    ) -> None:
        self._ranges = ranges
        self._paths = paths
        self._premises = premises

    def check(self, batch: Sequence[torch.Tensor], state: State) -> None:
        """Look at the inputs of a call.

        Raises:
            Error: one is out of range, "Index out of range".
        """
        for wanted in self._ranges:
            value = _value(wanted, batch, state)
            places = wanted.outside(value)
            if places:
                raise self._error(wanted, value, places[0], _CHECKED)

    def explain(
        self, error: BaseException, batch: Sequence[torch.Tensor], state: State
    ) -> BaseException:
        """Return what to raise for a call that failed: an error that names the input, if it can."""
        if not isinstance(error, RuntimeError | IndexError) or not _COMPLAINT.search(str(error)):
            return error
        for wanted in self._premises():
            value = _value(wanted, batch, state)
            for place in wanted.outside(value)[:1]:
                better = self._error(wanted, value, place, ())
                better.__notes__ = getattr(error, "__notes__", [])
                return better
        return error

    def _error(
        self, wanted: Range, value: torch.Tensor, place: tuple[int, ...], more: tuple[str, ...]
    ) -> Error:
        slot = wanted.slot
        name = self._paths[slot.index] if slot.kind is Kind.BATCH else slot.path
        besides = "".join(f", or {each}" for each in sorted(wanted.ignored))
        at = f"[{', '.join(map(str, place))}]" if place else ""
        line = "" if wanted.line is None else f", at {source.describe(*wanted.line)}"
        return Error(
            "Index out of range",
            got=f'input "{name}"{at} is {value[place].item()}; {wanted.operator} takes '
            f"{wanted.least} to {wanted.most}{besides}{line}",
            fix=("pass labels and indices within the range, or make the layer larger", *more),
        )


_CHECKED = ("options.Precision.checkIndices(False) before wrapping leaves this check out",)


def _value(wanted: Range, batch: Sequence[torch.Tensor], state: State) -> torch.Tensor:
    slot = wanted.slot
    return batch[slot.index] if slot.kind is Kind.BATCH else state.tensors[slot.key]
