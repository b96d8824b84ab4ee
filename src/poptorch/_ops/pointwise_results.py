"""Predict what a pointwise operator returns for tensors of another shape.

If all tensors of a call have the same shape and the usual memory layout, the result has this shape
and layout, too. Its type depends only on the types of the arguments. Weights of many shapes are
therefore updated by a traced optimizer step at the price of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_SETTINGS = {
    bool,
    int,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


def likeness(
    args: Sequence[Any], kwargs: dict[str, Any], describe: Callable[[torch.Tensor], Any]
) -> tuple[Any, ...] | None:
    """Return a key of the arguments of a call, without the sizes of tensors and the values of
    ``float`` numbers. An ``int`` may be a size, so it is a part of the key. Return None if the
    arguments are not tensors of one shape, 0-d tensors, numbers and settings.

    ``describe``: returns what else the key contains about a tensor.
    """
    shapes: set[torch.Size] = set()
    key: list[Any] = [torch.get_default_dtype(), torch.is_grad_enabled(), *kwargs]
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            if each.dim():
                shapes.add(each.shape)
            if len(shapes) > 1 or not each.is_contiguous():
                return None
            key.append((each.dim(), each.dtype, describe(each)))
        elif type(each) is float:
            key.append(float)
        elif type(each) in _SETTINGS:
            key.append((type(each), each))
        else:
            return None
    return tuple(key)


def model_of(tensors: Sequence[torch.Tensor], written: bool) -> torch.Tensor | None:
    """Return a tensor with the shape and layout of the result of such a call. Return None for a
    new result with a dimension of size 1, whose layout is arbitrary.

    ``written``: the result is the first argument.
    """
    found = next((each for each in tensors if each.dim()), tensors[0])
    return found if written or all(size > 1 for size in found.shape) else None
