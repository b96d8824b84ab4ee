"""Represent values that a mask selects. Their number is not known in a program of fixed shapes.

A CTC loss can use them as its targets, because it gets the number of targets of each sample. All
other uses need the number of values, and are refused in the same way as the selection itself.
"""

from __future__ import annotations

from typing import Any

import torch


class Selected:
    def __init__(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        self._value, self._mask = torch.broadcast_tensors(value, mask)  # type: ignore[no-untyped-call]

    def targets(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values in rows, and the lengths of the rows; the lengths are too long if the
        values do not fit.
        """
        values, chosen = self._value.flatten(), self._mask.flatten()
        values = values[(~chosen).to(torch.uint8).argsort(stable=True)]
        longest = self._value.shape[-1]
        starts = lengths.cumsum(0) - lengths
        places = starts[:, None] + torch.arange(longest, device=values.device)
        fits = lengths.sum() == chosen.sum()
        return values[places.clamp(0, len(values) - 1)], torch.where(fits, lengths, longest + 1)

    def whole(self) -> torch.Tensor:
        """Refuse other uses, which need the number of values."""
        selected: torch.Tensor = torch.ops.aten.masked_select.default(self._value, self._mask)
        return selected

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        lists = (each if isinstance(each, (list, tuple)) else (each,) for each in given)
        return next(each for some in lists for each in some if isinstance(each, cls)).whole()


def select(function: Any, input: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> Any:
    """Replace ``masked_select`` for integers, because only integers can be targets."""
    is_whole = not (input.is_floating_point() or input.is_complex())
    if not is_whole or mask.dtype is not torch.bool or input.dim() == 0 or kwargs:
        return function(input, mask, **kwargs)
    return Selected(input, mask)


def _of_whole(name: str) -> property:
    return property(lambda self: getattr(self.whole(), name))


for _name in {*dir(torch.Tensor)} - {*dir(Selected)}:
    if _name.startswith("__"):  # Python looks these up in classes only
        setattr(Selected, _name, _of_whole(_name))
