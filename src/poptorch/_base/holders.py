"""Objects that hold tensors without being containers that are traversed."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

MOST = 10_000  # objects that are looked at, so that a whole program hanging on one is no delay
_PLAIN = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes, int, float,
    complex, torch.dtype, torch.device, torch.Generator,
)  # fmt: skip
_GROUPS = (list, tuple, set, frozenset, collections.deque)


def holds_tensors(value: object) -> bool:
    """Tell whether tensors are found in an object: its attributes, elements, and theirs."""
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < MOST:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            return True
        if id(item) in seen or isinstance(item, _PLAIN):
            continue
        seen.add(id(item))
        stack += _inside(item)
    return False


def _inside(item: Any) -> Iterable[Any]:
    attributes = getattr(item, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.values()
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                yield getattr(item, name)
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, _GROUPS):
        yield from item
