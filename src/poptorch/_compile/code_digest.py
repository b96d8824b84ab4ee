"""Digest the Python code of a model, to recognize a model that was compared with eager PyTorch.

A capture may be wrong for one model and right for another one although both have the same graph,
for example if ``forward`` decides by the text of an error.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_MOST = 4096  # functions; a model with more of them is recognized by these
_LIBRARIES = "torch", "poptorch", "builtins"  # their versions are known


def code_digest(model: nn.Module) -> str:
    """Return a digest of the methods of a model's classes, of functions in its attributes, and of
    the functions to which these refer by a name.
    """
    digest, seen = hashlib.sha256(), dict[types.CodeType, None]()
    waiting = list(reversed([*_functions(model)]))
    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        code = function.__code__
        if code in seen or _is_known(function.__module__):
            continue
        seen[code] = None
        digest.update(_text(code).encode())
        called = [function.__globals__.get(name) for name in _names(code)]
        called += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        waiting += [each for each in called if isinstance(each, types.FunctionType)]
    return digest.hexdigest()


def _functions(model: nn.Module) -> Iterator[types.FunctionType]:
    classes = dict.fromkeys(cls for each in model.modules() for cls in type(each).__mro__)
    owners: list[Any] = [cls for cls in classes if not _is_known(cls.__module__)]
    for owner in (*owners, *model.modules()):
        for value in list(vars(owner).values()):
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                yield inner


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _text(code: types.CodeType) -> str:
    """Return a text that is the same in all processes, wherever the code is in its file."""
    parts = (_constant(each) for each in code.co_consts)
    return f"{code.co_code!r}{code.co_names}{code.co_varnames}{','.join(parts)};"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _text(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
