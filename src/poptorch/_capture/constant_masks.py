"""Replace masks whose values are known during a capture by the positions of their true elements.

The number of elements that a mask selects is part of the shape of the result. If the mask is a
constant or a buffer that ``forward`` does not change, this number is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .eager_errors import READS, WRITES, is_mask
from .recorded import recorded
from .trace import untraced

aten = torch.ops.aten


class ConstantMasks:
    """Replaces masks in the arguments of operators. ``value`` returns a tensor's value, or None."""

    def __init__(self, value: Callable[[torch.Tensor, str], torch.Tensor | None]) -> None:
        self._value = value
        # by mask, its value when it was last used, and the positions of its true elements
        self._known: dict[fx.Node | int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator, or NotImplemented if it does not depend on masks whose
        values are known.
        """
        if func in READS or func in WRITES:
            return self._indexed(func, args, kwargs)
        if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
            return NotImplemented
        if func is aten.masked_select.default:
            value, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            indices = self._indices(func, [mask])
            return NotImplemented if indices is None else aten.index.Tensor(value, indices)
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        known = {id(each): self._value(each, str(func)) for each in tensors}
        if not known or any(each is None for each in known.values()):
            return NotImplemented
        with untraced():
            return func(*(known.get(id(each), each) for each in args), **kwargs)

    def _indexed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(map(is_mask, args[1])):
            return NotImplemented
        indices = self._indices(func, args[1])
        return NotImplemented if indices is None else func(args[0], indices, *args[2:], **kwargs)

    def _indices(self, func: Any, indices: list[Any]) -> list[Any] | None:
        """Return indices without masks, or None if the values of a mask are not known."""
        found = list[Any]()
        for index in indices:
            if not is_mask(index):
                found.append(index)
                continue
            # A value that is written to all elements does not depend on their number.
            places = self._places(index, str(func), only_if_read=func in WRITES)
            if places is None:
                return None
            found += places
        return found

    def _places(
        self, mask: torch.Tensor, operator: str, only_if_read: bool
    ) -> tuple[torch.Tensor, ...] | None:
        node = recorded(mask)
        key = id(mask) if node is None else node
        if only_if_read and key not in self._known:
            return None
        value = self._value(mask, operator)
        if value is None:
            return None
        with untraced():
            before = self._known.get(key)
            if before is not None and torch.equal(before[0], value):
                return before[1]
            # forward may have written to the mask since it used it
            positions = value.to(torch.bool).nonzero(as_tuple=True)
            self._known[key] = value.clone(), positions
        return positions
