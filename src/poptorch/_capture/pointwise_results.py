"""Predict what a pointwise operator returns for tensors of another shape.

If all tensors of a call have the same shape and the usual memory layout, the result has this shape
and layout, too. Its type depends only on the types of the arguments. Weights of many shapes are
therefore updated by a traced optimizer step at the price of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NUMBERS = (bool, int, float)


class _OtherArgument(Exception):  # noqa: N818 (the call is not predicted)
    """An argument is neither a tensor nor a number nor a setting."""


def likeness(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that calls with results of the same kind share; None if a call has other
    arguments than tensors of one shape and numbers.

    The shapes of the tensors, and the values of the numbers, are not part of the key.
    """
    if torch.Tag.pointwise not in func.tags:
        return None
    try:
        described = [_described(each) for each in (*args, *kwargs.values())]
    except _OtherArgument:
        return None
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    shapes = {each.shape for each in given if each.dim()}
    usual = all(each.is_contiguous() for each in given)
    # the layout of a dimension of size 1 is arbitrary, except in a tensor that is written to
    if len(shapes) > 1 or not usual or not (func._schema.is_mutable or _is_large(shapes)):
        return None
    settings = torch.get_default_dtype(), torch.is_grad_enabled()
    return (func, *settings, *kwargs, *described)


def _is_large(shapes: set[torch.Size]) -> bool:
    return all(size > 1 for shape in shapes for size in shape)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return bool(value.dim()), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        raise _OtherArgument
    return type(value) if type(value) in _NUMBERS else (type(value), value)


def like_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor with the shape and layout of the result."""
    return next((each for each in tensors if each.dim()), tensors[0])
