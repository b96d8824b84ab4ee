"""Find the hooks that run before and after each step of an optimizer: its own, and global ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._base.errors import AssertionFailure
from .._base.source import definition_line
from .._ir.traced_step import StepHooks

_NOTED = "_hooks_when_set"


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Return the hooks around the steps of one optimizer, as they were when it was set."""
    noted = vars(optimizer).get(_NOTED)
    return present_hooks(optimizer) if noted is None else noted


def present_hooks(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Return the hooks that eager PyTorch would run now, in order, without torch's own hooks."""
    before = _of_users(optimizer._optimizer_step_pre_hooks.values())
    after = _of_users(optimizer._optimizer_step_post_hooks.values())
    before_all, after_all = (_of_users(known.values()) for known in hooks_of_all())
    return StepHooks((*before_all, *before), (*after, *after_all))


def note_hooks(optimizer_copy: torch.optim.Optimizer, hooks: StepHooks) -> None:
    """Let a copy of an optimizer keep its hooks, whatever is registered later."""
    vars(optimizer_copy)[_NOTED] = hooks
    optimizer_copy._optimizer_step_pre_hooks = OrderedDict(optimizer_copy._optimizer_step_pre_hooks)
    optimizer_copy._optimizer_step_post_hooks = OrderedDict(
        optimizer_copy._optimizer_step_post_hooks
    )


@functools.cache
def hooks_of_all() -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return the hooks before and after each step of any optimizer, which follow changes."""
    registering = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    handles = [register(lambda *_: None) for register in registering]
    found = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    before, after = found
    assert before is not None
    assert after is not None
    return before, after


def constants_of(hooks: StepHooks) -> dict[str, Any]:
    """Return the numbers, flags and strings of variables that hooks use, by name."""
    found: dict[str, Any] = {}
    for hook in (*hooks.before, *hooks.after):
        code = getattr(hook, "__code__", None)
        cells = getattr(hook, "__closure__", None) or ()
        for name, cell in zip(() if code is None else code.co_freevars, cells, strict=False):
            with contextlib.suppress(ValueError):  # it has no value yet
                if isinstance(cell.cell_contents, bool | int | float | str):
                    found[f"'{name}' of hook {_name_of(hook)}"] = cell.cell_contents
    return found


def digest_of(hooks: StepHooks) -> str:
    """Return a text that differs if the code of hooks does, or a number that they use."""
    codes = [getattr(hook, "__code__", None) for hook in (*hooks.before, *hooks.after)]
    parts = [(code.co_code, code.co_names) for code in codes if code is not None]
    names = [*map(_name_of, hooks.before), "step", *map(_name_of, hooks.after)]
    whole = repr((names, parts, sorted(constants_of(hooks).items())))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _name_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _of_users(hooks: Iterable[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    return tuple(
        hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")
    )


def refuse_hooks(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse the hooks of an optimizer whose class has no step in Python that could run them."""
    hooks = [*hooks_of(optimizer).before, *hooks_of(optimizer).after]
    if hooks:
        plural = "s" * (len(hooks) != 1)
        raise AssertionFailure(
            "Hooks cannot be part of the steps of this optimizer",
            got=f"{len(hooks)} hook{plural} of {name}, whose steps are formulas of poptorch",
            where=definition_line(hooks[0]),
            fix=(
                "use the class of the same name of torch.optim, whose steps run hooks",
                "or remove the hook: call remove() on what registering the hook returned",
            ),
        )
