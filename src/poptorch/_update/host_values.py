"""Notice what code changes on the host, and undo it.

A step and its hooks run while they are traced, and not at each update. Objects on the host that
they change would therefore be changed only once.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._ir.traced_step import Leaf, TracedStep, flat

_DEPTH = 4  # levels of objects in objects that are looked at
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, Tensor, Leaf, types.ModuleType)
_ABSENT = object()
StepHook = Callable[..., Any]


class HostValues:
    """What code can reach in Python, with what it holds, except for the optimizer itself.

    These are the variables of closures, globals, and the attributes of objects, in which it looks
    for further objects.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._saved: dict[int, tuple[str, Any, Any]] = {}  # by identity: name, holder, contents
        self._cells: list[tuple[str, Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._classes: list[tuple[type, str, Any]] = []
        self._optimizer = optimizer

    @classmethod
    def of_hook(cls, hook: StepHook, optimizer: Any) -> HostValues:
        values = cls(optimizer)
        values._save_function(hook, "the hook", _DEPTH)
        return values

    @classmethod
    def of_steps(cls, traced: TracedStep) -> HostValues:
        """Return what the steps of optimizers can reach, except for tensors and numbers in their
        attributes, groups and state, which are part of the step.
        """
        values = cls()
        for optimizer in traced.optimizers:
            for kind in optimizer.cls.__mro__:
                if kind is not object and not _is_of_torch(kind.__module__):
                    values._save_class(kind)
            for name, value in flat(optimizer.attributes, every=True).items():
                values._save(value, f"attribute '{name}'", _DEPTH)
        for at, group in enumerate(traced.groups):
            for name, value in flat(group.values, every=True).items():
                values._save(value, f"'{name}' of parameter group {at}", _DEPTH)
        for optimizer in traced.optimizers:
            for path, entry in {**optimizer.state, **traced.layouts}.items():
                for name, value in flat(entry, every=True).items():
                    values._save(value, f"state '{name}' of '{path}'", _DEPTH)
        return values

    def _save_class(self, kind: type) -> None:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                self._save_function(value, name, _DEPTH)
            elif not name.startswith("__"):
                self._classes.append((kind, name, value))
                self._save(value, f"attribute '{name}' of the class {kind.__name__}", _DEPTH)

    def _save_function(self, function: Any, name: str, depth: int) -> None:
        if isinstance(function, functools.partial):
            self._save_function(function.func, name, depth)
            self._save([*function.args, function.keywords], "an argument of the hook", depth)
            return
        owner = getattr(function, "__self__", None)
        if owner is not None:
            self._save(owner, type(owner).__name__, depth)
        code = getattr(function, "__code__", None)
        if code is None:
            if owner is None:  # an object that can be called
                self._save(function, type(function).__name__, depth)
            return
        self._save([*(function.__defaults__ or ())], "a default of the hook", depth)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                self._cells.append((f"variable '{variable}'", cell, cell.cell_contents))
                self._save(cell.cell_contents, f"variable '{variable}'", depth)
        space = function.__globals__
        for variable in code.co_names:
            value = space.get(variable, _ABSENT)
            self._globals.append((space, variable, value))
            if value is not _ABSENT:
                self._save(value, f"variable '{variable}'", depth)

    def _save(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._saved or depth == 0:
            return
        if value is self._optimizer:
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            if not _is_of_torch(value.__module__):
                self._save_function(value, name, depth - 1)
            return
        holder = _holder(value)
        if holder is None:
            return
        contents = dict(holder) if isinstance(holder, dict) else list(holder)
        self._saved[id(value)] = name, holder, contents
        of_object = holder is not value
        for key, item in contents.items() if isinstance(contents, dict) else enumerate(contents):
            inner = f"attribute '{key}' of {name}" if of_object else name
            self._save(item, inner, depth - 1)

    def restore(self) -> list[str]:
        """Let everything be as it was; return the names of what was changed."""
        changed = []
        for name, cell, value in self._cells:
            if cell.cell_contents is not value:
                changed.append(name)
                cell.cell_contents = value
        for space, variable, value in self._globals:
            if space.get(variable, _ABSENT) is not value:
                changed.append(f"variable '{variable}'")
                if value is _ABSENT:
                    del space[variable]
                else:
                    space[variable] = value
        for kind, name, value in self._classes:
            if vars(kind).get(name, _ABSENT) is not value:
                changed.append(f"attribute '{name}' of the class {kind.__name__}")
                setattr(kind, name, value)
        for name, holder, contents in self._saved.values():
            if not _is_as_before(holder, contents):
                changed.append(name)
                _fill(holder, contents)
        return list(dict.fromkeys(changed))


def _holder(value: Any) -> Any:
    """Return the container of what a value holds; None if nothing of it is looked at."""
    if isinstance(value, list | dict | set | deque):
        return value
    if isinstance(value, tuple):
        return list(value)
    module = type(value).__module__
    if isinstance(value, nn.Module) or module.partition(".")[0] not in ("torch", "poptorch"):
        return getattr(value, "__dict__", None)
    return None


def _is_as_before(holder: Any, contents: Any) -> bool:
    if isinstance(holder, dict):
        same = list(holder) == list(contents)
        return same and all(holder[key] is each for key, each in contents.items())
    return len(holder) == len(contents) and all(
        now is before for now, before in zip(holder, contents, strict=True)
    )


def _fill(holder: Any, contents: Any) -> None:
    holder.clear()
    if isinstance(holder, list | deque):
        holder.extend(contents)
    else:
        holder.update(contents)


def _is_of_torch(module: str | None) -> bool:
    return str(module).partition(".")[0] == "torch"
