"""Let Python's functions of numbers compute with the numbers of a step."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .step_values import as_number
from .traced_numbers import TracedNumber, seen_by_steps, tensor_of

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
_WHOLE = {"floor", "ceil", "trunc"}


def _least(a: Any, b: Any) -> Any:
    return torch.where(b < a, b, a)


def _most(a: Any, b: Any) -> Any:
    return torch.where(b > a, b, a)


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent


def _of_numbers(
    usual: Callable[..., Any], ours: Callable[..., Any], whole: bool = False
) -> Callable[..., Any]:
    """Return a function that computes with tensors if it gets a number of a step, or a tensor."""

    def call(*args: Any) -> Any:
        if not any(isinstance(a, Tensor) or type(a) is TracedNumber for a in args):
            return usual(*args)
        numbers = [a.reshape(()).item() if isinstance(a, Tensor) else a for a in args]
        result = ours(*map(tensor_of, numbers))
        return seen_by_steps(as_number(result, whole=True) if whole else result)

    return call


def _extreme(usual: Callable[..., Any], ours: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if named or not any(map(_is_scalar, values)):
            return usual(*args, **named)
        result, *rest = map(tensor_of, values)
        for each in rest:
            result = ours(result, each)
        return seen_by_steps(result)

    return call


def _is_scalar(value: Any) -> bool:
    return type(value) is TracedNumber or (isinstance(value, Tensor) and value.dim() == 0)


@contextlib.contextmanager
def numbers_functions() -> Iterator[None]:
    """Make functions of ``math``, ``min`` and ``max`` accept the numbers of a step."""
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (math, name, _of_numbers(getattr(math, name), ours, name in _WHOLE))
        for name, ours in _MATH.items()
    ]
    replacements.append((math, "pow", _of_numbers(math.pow, _power)))
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
