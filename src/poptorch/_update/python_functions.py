"""Let Python's functions of numbers accept the tensors that replace numbers in a step."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_MATH = {
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "fabs": torch.abs,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "trunc": torch.trunc,
    "erf": torch.erf,
}


def _least(a: Any, b: Any) -> Any:
    return torch.where(b < a, b, a)


def _most(a: Any, b: Any) -> Any:
    return torch.where(b > a, b, a)


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent


def _of_tensors(usual: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return ours(*args) if any(isinstance(a, Tensor) for a in args) else usual(*args)

    return call


def _extreme(usual: Callable[..., Any], ours: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if named or not any(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            return usual(*args, **named)
        result, *rest = values
        for each in rest:
            result = ours(result, each)
        return result

    return call


@contextlib.contextmanager
def numbers_functions() -> Iterator[None]:
    """Make functions of ``math``, ``min`` and ``max`` accept tensors that represent numbers."""
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (math, name, _of_tensors(getattr(math, name), ours)) for name, ours in _MATH.items()
    ]
    replacements.append((math, "pow", _of_tensors(math.pow, _power)))
    replacements.append((builtins, "min", _extreme(min, _least)))
    replacements.append((builtins, "max", _extreme(max, _most)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, ours in replacements:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, usual in before:
            setattr(owner, name, usual)
