"""Labels and indices among the inputs, looked at before a call changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._base import source
from .._base.errors import Error
from .._ir.indices import Range
from .._ir.slot import Kind
from .._ir.state import State

_FEW = 64  # numbers that Python looks through sooner than torch starts: 3 us instead of 9


class Indices:
    """What the inputs of one compilation must lie in.

    Args:
        ranges: of each input that is an index; none where the check is off.
        paths: of the inputs.
    """

    def __init__(self, ranges: Sequence[Range], paths: Sequence[str]) -> None:
        self._ranges = ranges
        self._paths = paths

    def check(self, batch: Sequence[torch.Tensor], state: State) -> None:
        """Look at the inputs of a call.

        Raises:
            Error: one is out of range, "Index out of range".
        """
        for wanted in self._ranges:
            slot = wanted.slot
            value = batch[slot.index] if slot.kind is Kind.BATCH else state.tensors[slot.key]
            if value.is_meta:  # a buffer of another process, which looks at it
                continue
            least, most = _extremes(value)
            if least < wanted.least or most > wanted.most:
                self._look(wanted, value)

    def _look(self, wanted: Range, value: torch.Tensor) -> None:
        """Find the first index that is out of range, if it is none that is ignored."""
        bad = (value < wanted.least) | (value > wanted.most)
        if wanted.ignored is not None:
            bad &= value != wanted.ignored
        places = bad.nonzero()
        if not len(places):
            return
        slot, place = wanted.slot, tuple(places[0].tolist())
        name = self._paths[slot.index] if slot.kind is Kind.BATCH else slot.path
        besides = "" if wanted.ignored is None else f", or {wanted.ignored}"
        at = f"[{', '.join(map(str, place))}]" if place else ""
        line = "" if wanted.line is None else f", at {source.describe(*wanted.line)}"
        raise Error(
            "Index out of range",
            got=f'input "{name}"{at} is {value[place].item()}; {wanted.operator} takes '
            f"{wanted.least} to {wanted.most}{besides}{line}",
            fix=(
                "pass labels and indices within the range, or make the layer larger",
                "options.Precision.checkIndices(False) before wrapping leaves this check out",
            ),
        )


def _extremes(value: torch.Tensor) -> tuple[float, float]:
    if value.numel() > _FEW:
        least, most = torch.aminmax(value)
        return least.item(), most.item()
    numbers = (value if value.dim() == 1 else value.flatten()).tolist()
    return min(numbers), max(numbers)
