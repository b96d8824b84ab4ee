"""Arguments of ``forward`` as JSON: structure, shapes and dtypes, and no value of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

LARGEST = 1 << 48
"""Elements of a tensor that a file may ask for."""
DEEPEST = 64
"""Dimensions of a tensor that a file may ask for: torch's loops take no more."""
MOST = 50_000
"""Values in the arguments that a file may have: each is looked at by the capture, many times."""
Json = Any


def encode(value: Any) -> Json:
    """Return a value as JSON.

    Raises:
        TypeError: it is neither a tensor, a plain value, nor a list, tuple or dict of them.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def decode(data: Json) -> Any:
    """Return the value that ``encode`` was given, with zeros for tensors, which take no memory.

    Raises:
        ValueError: this is nothing that ``encode`` returns.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {"tensor", "shape"}:
        return _tensor(_dtype(data["tensor"]), data["shape"])
    readers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "dtype": _dtype,
        "tuple": lambda items: tuple(decode(item) for item in items),
        "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    }
    try:
        ((form, content),) = data.items()
        return readers[form](content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no value: {data}") from error


def decode_all(data: Json) -> dict[str, Any]:
    """Return values by name.

    Raises:
        ValueError: this is nothing that ``encode`` returns, for a value of each name.
    """
    if not isinstance(data, Mapping):
        raise ValueError("no values by name")
    if _count(data) > MOST:
        raise ValueError(f"more than {MOST} values")
    return {str(name): decode(value) for name, value in data.items()}


def _count(data: Json) -> int:
    """Return how many values there are, all levels of lists and dicts together."""
    count, waiting = 0, [data]
    while waiting and count <= MOST:
        count += 1
        inside = waiting.pop()
        if isinstance(inside, Mapping):
            waiting += inside.values()
        elif isinstance(inside, list):
            waiting += inside
    return count


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def _tensor(dtype: torch.dtype, shape: Any) -> torch.Tensor:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"no shape: {shape!r}")
    if len(shape) > DEEPEST or math.prod(shape) > LARGEST:
        raise ValueError(f"too large a shape: {shape!s:.80}")
    return torch.zeros((), dtype=dtype).expand(shape)
