"""Describe what an object holds, so that a change of it can be noticed and named.

Equal texts mean equal contents. Unlike ``repr``, the text of an object contains its fields and no
address, and that of a function the values that it closes over.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_DEPTH = 4  # levels of objects in objects that are looked at
_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device),
    *(enum.Enum, os.PathLike),
)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


def is_plain(value: Any) -> bool:
    """Return whether a value has no fields: a tensor, a number, or a container of such."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(is_plain, value))
    return isinstance(value, (*_ATOMS, torch.Tensor, type))


def contents_of(value: Any, depth: int = _DEPTH) -> str:
    """Return a text for a value. What is in more than ``depth`` objects is left out."""
    if isinstance(value, _ATOMS):
        return repr(value)
    name = _name(value if isinstance(value, type) else type(value))
    if isinstance(value, torch.Tensor):
        return f"{name}{tuple(value.shape)}"
    if depth == 0 or isinstance(value, type | types.ModuleType | torch.nn.Module):
        return name
    inner = functools.partial(contents_of, depth=depth - 1)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {inner(each)}" for key, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, _CONTAINERS):
        return f"{'' if type(value) is list else name}[{', '.join(map(inner, value))}]"
    if isinstance(value, types.FunctionType):
        name = f"{value.__qualname__}, code {_digest(value.__code__)}, "
    elif isinstance(value, types.BuiltinFunctionType):
        name = value.__qualname__
    fields = fields_of(value)
    cls: Any = type(value)
    if not fields and cls.__repr__ is not object.__repr__ and not callable(value):
        return repr(value)
    return f"{name}({', '.join(f'{key}={inner(each)}' for key, each in fields.items())})"


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object, or the values that a function closes over."""
    if isinstance(value, types.FunctionType):
        return dict(_closed_over(value))
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    slots = (name for cls in type(value).__mro__ for name in _names(cls))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held |= dict(getattr(value, "__dict__", {}))
    return {name: each for name, each in held.items() if not _is_cache(type(value), name)}


def _is_cache(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), functools.cached_property)


def _digest(code: types.CodeType) -> str:
    constants = (
        _digest(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts
    )
    whole = repr((code.co_code, code.co_names, *constants))
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if function.__defaults__:
        yield "defaults", function.__defaults__
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents


def _names(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _name(cls: type) -> str:
    return cls.__qualname__
