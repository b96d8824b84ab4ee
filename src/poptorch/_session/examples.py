"""Arguments of ``forward`` as JSON: structure, shapes and dtypes, and no value of a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .._base import json_codec
from .._base.json_codec import Json

LARGEST = 1 << 48
"""Elements of a tensor that a file may ask for."""
DEEPEST = 64
"""Dimensions of a tensor that a file may ask for: torch's loops take no more."""
MOST = 50_000
"""Values in the arguments that a file may have: each is looked at by the capture, many times."""


def encode(value: Any) -> Json:
    """Return a value as JSON.

    Raises:
        TypeError: it is neither a tensor, a plain value, nor a list, tuple or dict of them.
    """
    return json_codec.encode(value, _tensor_form)


def _tensor_form(value: Any) -> Json:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(value).__qualname__} has no JSON form")
    return {"tensor": [json_codec.encode(value.dtype), list(value.shape)]}


def decode(data: Json) -> Any:
    """Return the value that ``encode`` was given, with zeros for tensors, which take no memory.

    Raises:
        ValueError, TypeError, RuntimeError, Unreadable: this is nothing that ``encode`` returns.
    """
    return json_codec.decode(data, readers={"tensor": _zeros})


def decode_all(data: Json) -> dict[str, Any]:
    """Return values by name; see ``decode``.

    Raises:
        ValueError, TypeError, RuntimeError, Unreadable: one is none, or they are too many.
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


def _zeros(content: Json) -> torch.Tensor:
    kind, shape = content
    dtype = json_codec.decode(kind)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {kind!s:.80}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"no shape: {shape!s:.80}")
    if len(shape) > DEEPEST or math.prod(shape) > LARGEST:
        raise ValueError(f"too large a shape: {shape!s:.80}")
    return torch.zeros((), dtype=dtype).expand(shape)
