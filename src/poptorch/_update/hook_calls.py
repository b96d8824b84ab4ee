"""Trace the user's hooks together with the step: what they do to tensors and groups is part of it.

A hook runs while the step is traced, and not at each step. Other objects on the host that it
changes, such as a list of norms, would therefore be changed only once. Such a hook is refused.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base.errors import Error
from .._base.source import definition_line
from .._ir.own_step import StepHooks

_DEPTH = 4  # of objects in objects that are looked at
_SHOWING = {"__repr__", "__format__", "__str__"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, Tensor, types.ModuleType)
_ABSENT = object()
StepHook = Callable[..., Any]


def call_step(optimizer: Any, hooks: StepHooks, step: Callable[..., Any]) -> None:
    """Call a step with its hooks before and after it, as torch does."""
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in hooks.before:
        with _checked(hook, optimizer):
            result = hook(optimizer, args, kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            args, kwargs = result
        elif result is not None:
            raise Error(
                "A hook before the optimizer's step returned neither None nor a pair",
                got=type(result).__name__,
                where=definition_line(hook),
                fix="return None, or the new arguments of step: (args, kwargs)",
            )
    step(*args, **kwargs)
    for hook in hooks.after:
        with _checked(hook, optimizer):
            hook(optimizer, args, kwargs)


@contextlib.contextmanager
def _checked(hook: StepHook, optimizer: Any) -> Iterator[None]:
    before = _HostValues(hook, optimizer)
    try:
        with _Shown(hook):
            yield
    finally:
        changed = before.restore()
    if changed:
        raise Error(
            "A hook of the optimizer's step changes values that are not part of the step",
            got=f"{', '.join(changed[:3])}; the compiled step runs no Python code",
            where=definition_line(hook),
            fix=(
                "let the hook change parameters, gradients, optimizer.state or "
                "optimizer.param_groups only",
                "or run this code after each call of the wrapped model, and call remove() on what "
                "registering the hook returned",
            ),
        )


class _Shown(TorchFunctionMode):
    """Refuses to print tensors, which have no values while a step is traced."""

    def __init__(self, hook: StepHook) -> None:
        super().__init__()
        self._hook = hook

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _SHOWING:
            raise Error(
                "A hook of the optimizer's step prints a tensor",
                got="a value that is known only while the compiled step runs",
                where=definition_line(self._hook),
                fix=(
                    "print it after each call of the wrapped model, and call remove() on what "
                    "registering the hook returned"
                ),
            )
        return func(*args, **(kwargs or {}))


class _HostValues:
    """What a hook can reach in Python, but for the optimizer that it is given.

    These are the variables of its closure, its globals, and the attributes of the object that it
    is a method of, with what these hold.
    """

    def __init__(self, hook: StepHook, optimizer: Any) -> None:
        self._saved: dict[int, tuple[str, Any, Any]] = {}  # by identity: name, holder, contents
        self._cells: list[tuple[str, Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._optimizer = optimizer
        self._save_function(hook, "the hook", _DEPTH)

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
            if not str(value.__module__).startswith("torch"):
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


def unhooked_step(optimizer: Any) -> Callable[..., Any]:
    """Return the step of a class without torch's wrapper, which calls hooks and takes the time."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
