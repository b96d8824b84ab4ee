"""Dispatch modes: hearing of single operators while a function is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._base import private

aten = torch.ops.aten
_Mode: Any = private.TorchDispatchMode


class ScalarReads(_Mode):  # type: ignore[misc]
    """Within it a function answers where torch's own code asks for the value of a tensor."""

    supports_higher_order_operators = True

    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        if func is aten.equal.default:
            first, second = args
            return first.shape == second.shape and self._answer((first == second).all())
        return func(*args, **(kwargs or {}))


class DynamicShapes(_Mode):  # type: ignore[misc]
    """Within it a function hears of operators whose results' shapes depend on values."""

    supports_higher_order_operators = True

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self._hear = hear

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Indexing is of that kind only where a mask selects.
        integers = func is aten.index.Tensor and not any(map(_is_mask, args[1]))
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and not integers:
            self._hear(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
