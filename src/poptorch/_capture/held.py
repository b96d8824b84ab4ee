"""Weights that forward reaches by another way than the attribute that they are registered under."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._base.errors import Error
from .swap import Tied


class Held(TorchFunctionMode):
    """Within it functions of torch take traced tensors in the place of the user's own."""

    def __init__(self, places: Mapping[str, Tied], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._traced = {id(tied.tensor): values[path] for path, tied in places.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        named = {name: self._traced_of(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._traced_of, args), **named)

    def _traced_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._traced.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._traced_of, value))
        return value


def refuse_held(constants: Sequence[torch.Tensor], trained: Mapping[str, torch.Tensor]) -> None:
    """Refuse constants that are parts of trained weights."""
    paths = {_storage(tensor): path for path, tensor in trained.items() if tensor.numel()}
    for constant in constants:
        path = paths.get(_storage(constant)) if constant.numel() else None
        if path is not None:
            raise Error(
                "forward uses a view of a weight that was made outside of it",
                got=f"a tensor of shape {tuple(constant.shape)} in the memory of '{path}': the "
                "program would go on with the values of now, and not train it",
                fix="make the view in forward, from the parameter",
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
