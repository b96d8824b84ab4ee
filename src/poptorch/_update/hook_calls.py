"""Trace the user's hooks together with the step: what they do to tensors and groups is part of it.

A hook runs while the step is traced, and not at each step. Other objects on the host that it
changes, such as a list of norms, would therefore be changed only once. Such a hook is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from .._base.errors import Error
from .._base.source import definition_line
from .._ir.traced_step import StepHooks
from .host_values import HostValues, StepHook
from .traced_numbers import SHOWN, read_value

_SHOWING = {"__repr__", "__format__", "__str__"}


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
                got=f"a result of type {type(result).__name__}",
                where=definition_line(hook),
                fix="return None, or the new arguments of step: (args, kwargs)",
            )
    step(*args, **kwargs)
    for hook in hooks.after:
        with _checked(hook, optimizer):
            hook(optimizer, args, kwargs)


@contextlib.contextmanager
def _checked(hook: StepHook, optimizer: Any) -> Iterator[None]:
    before = HostValues.of_hook(hook, optimizer)
    try:
        with _PrintRefusal(hook):
            yield
    finally:
        changed = before.restore()
    if changed:
        raise Error(
            "A hook of the optimizer's step changes values that are not part of the step",
            got=f"{', '.join(changed[:3])}; the compiled step does not run the hook's Python code",
            where=definition_line(hook),
            fix=(
                "let the hook change parameters, gradients, optimizer.state or "
                "optimizer.param_groups only",
                "or run this code after each call of the wrapped model, and call remove() on what "
                "registering the hook returned",
            ),
        )


class _PrintRefusal(TorchFunctionMode):
    """Refuses to print tensors, which have no values while a step is traced."""

    def __init__(self, hook: StepHook) -> None:
        super().__init__()
        self._hook = hook

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shows = args[1] == SHOWN if func is read_value else func.__name__ in _SHOWING
        if shows:
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


def unhooked_step(optimizer: Any) -> Callable[..., Any]:
    """Return the step of a class without torch's wrapper, which calls hooks and takes the time."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
