"""Represent the values of a step: tensors, and numbers that are tensors.

A 0-d tensor of float64 represents a Python number that changes between updates. It is marked, so
that arithmetic with it follows Python's type rules instead of the rules for tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import private

_SEQUENCES = (list, tuple)
_CONTAINERS = frozenset({list, tuple, dict})
# Most arguments of operators are tensors or of these types, which are recognised first.
ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
MARK = "represents_int"  # an attribute of tensors that represent numbers


class Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def unobserved() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no mode intercepts functions, for computations that are not part of
    a step.
    """
    return _without_functions()()


@functools.cache
def _without_functions() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return private.optional("DisableTorchFunction") or contextlib.nullcontext


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and MARK in vars(value)


def as_number(tensor: Tensor, whole: bool = False) -> Tensor:
    """Mark a tensor. With ``whole``, it represents an ``int``, and otherwise a ``float``."""
    vars(tensor)[MARK] = whole
    return tensor


def is_whole(value: Any) -> bool:
    """Return whether a value is an ``int``, or represents one."""
    if isinstance(value, Tensor):
        return bool(vars(value).get(MARK))
    return isinstance(value, int) and not isinstance(value, bool)


def place_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory, which is the same for its views."""
    place: int = tensor.untyped_storage()._cdata
    return place


def geometry_of(tensor: Tensor) -> Geometry:
    offset = int(tensor.storage_offset())
    return Geometry(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested values, for example in ``(args, kwargs)`` of a call."""
    found: list[Tensor] = []
    _collect(value if type(value) in _SEQUENCES else (value,), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for each in values:
        if type(each) in ATOMS or (type(each) in _CONTAINERS and not each):
            continue
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, _SEQUENCES):
            _collect(each, found)
        elif isinstance(each, dict):
            _collect(each.values(), found)


def replaced(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested values with each tensor replaced by the result of a function."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(replaced(each, function) for each in value)
    if isinstance(value, dict):
        return {key: replaced(each, function) for key, each in value.items()}
    return value
