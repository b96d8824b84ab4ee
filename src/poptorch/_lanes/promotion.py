"""Keep the types that numbers give to the result of an operator, which lanes must not change.

A tensor without dimensions determines the type of a result only if no tensor with dimensions has
the same category: ``half * number`` is half, regardless of the type of the number. In lanes, the
number has a dimension. It is therefore first cast to the type in which the operator computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._ir.slots import HALF_TYPES

aten = torch.ops.aten

# These read a second operand without dimensions in float32 if the first one is narrower.
_READING_WIDE = {aten.mul.Tensor, aten.div.Tensor}


def computed(
    node: fx.Node, args: Sequence[Any], varying: Sequence[bool], kwargs: Mapping[str, Any]
) -> Any:
    """Call a pointwise operator over lanes, after casting its arguments as it casts those of a
    single lane.
    """
    target: Any = node.target
    of_lane = [_value(each) for each in node.args]
    tensors = [value for value in of_lane if value is not None]
    if len({value.dtype for value in tensors}) < 2:
        return target(*args, **kwargs)
    common = _common_type(tensors)
    assert common is not None
    numbers = [
        own and value is not None and not value.dim() and value.dtype not in (common, torch.bool)
        for value, own in zip(of_lane, varying, strict=True)
    ]
    if target in _READING_WIDE and common in HALF_TYPES and numbers[:2] == [False, True]:
        return target(*(each.to(torch.float32) for each in args), **kwargs).to(common)
    pairs = zip(args, numbers, strict=True)
    return target(*(each.to(common) if number else each for each, number in pairs), **kwargs)


def _value(argument: Any) -> torch.Tensor | None:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _common_type(values: Sequence[torch.Tensor]) -> torch.dtype | None:
    wide = _promoted_types(value.dtype for value in values if value.dim())
    numbers = _promoted_types(value.dtype for value in values if not value.dim())
    if wide is None or numbers is None:
        return wide or numbers
    if wide.is_floating_point and numbers.is_complex:
        return wide.to_complex()
    return torch.promote_types(wide, numbers) if _category(numbers) > _category(wide) else wide


def _promoted_types(types: Iterable[torch.dtype]) -> torch.dtype | None:
    found = list(types)
    return functools.reduce(torch.promote_types, found) if found else None


def _category(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 1 + dtype.is_floating_point + 2 * dtype.is_complex
