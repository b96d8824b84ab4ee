"""Detect changes of an optimizer that a compiled update does not follow: values, weights, hooks,
step.

Everything in the optimizer is compared. Whether a difference matters is decided by translating the
optimizer again: if the result is the same update with the same numbers, nothing has changed.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._base import log
from ..._base.contents import contents_of, is_plain
from ...optim.joint import class_of, members_of
from ...optim.optimizer import VariableAttributes
from ...optim.step_hooks import constants_of, present_hooks
from ..host_changes import ChangeCheck, is_same, shorten

_NUMBERS = "call setOptimizer(optimizer) on the wrapped model, also after each scheduler.step()"
_PARAMETERS = "call destroy() on the wrapped model, then setOptimizer(optimizer)"
_STEPS = (
    "the compiled program makes the steps, and one call may make several. Run this code "
    "after each call of the wrapped model, or move it into forward. Hooks that are registered "
    "before you wrap the "
    "model are part of the steps"
)
_GONE = object()
# What torch stores in an optimizer in addition to settings. Groups and ``step`` have other checks.
_BOOKKEEPING = {"state", "param_groups", "defaults", "step"}
_SCHEDULERS = torch.optim.lr_scheduler.__name__
Matters = Callable[[], bool]


class OptimizerChangeChecks:
    """The checks of one of the user's optimizers; the one of its hyper-parameters is the first.

    ``matters`` returns whether the optimizer would now be compiled to another update, or has other
    numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, matters: Matters) -> None:
        self._optimizer, self._matters = optimizer, matters
        self.checks = [*self._of_settings(), _steps(optimizer)]

    def _of_settings(self) -> list[ChangeCheck]:
        made_by = _numbers, _attributes, _parameters
        return [make(self._optimizer, self._matters) for make in made_by]

    def expect(self) -> None:
        """Accept the present settings, which the program has. Hooks and ``step`` are never part of
        the program.
        """
        present = self._of_settings()
        for new, old in zip(present, self.checks, strict=False):
            new.reported = old.reported
        self.checks = [*present, *self.checks[len(present) :]]


def _numbers(optimizer: torch.optim.Optimizer, matters: Matters) -> ChangeCheck:
    names = _entries(optimizer)
    get = operator.itemgetter(*names) if len(names) > 1 else _few(names)

    holds_objects = not all(
        is_plain(value) for each in optimizer.param_groups for value in get(each)
    )

    def numbers() -> list[tuple[Any, ...]]:
        found = list(map(get, optimizer.param_groups))
        return [tuple(map(_comparable, each)) for each in found] if holds_objects else found

    def keep(numbers: list[tuple[Any, ...]]) -> list[Any]:
        return list(map(_copied, numbers))

    def changes(before: list[Any]) -> Iterator[str]:
        if not matters():
            return
        for index, pair in enumerate(zip(before, numbers(), strict=False)):
            for name, old, new in zip(names, *pair, strict=True):
                if not is_same(new, old):
                    yield f"{name} of the optimizer's group {index} was {old} and is {new}"

    return ChangeCheck(numbers, changes, _NUMBERS, keep)


def _few(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return lambda group: tuple(group[name] for name in names)


def _entries(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of entries that all groups have."""
    groups = optimizer.param_groups
    first = groups[0] if groups else {}
    return [name for name in first if name != "params" and all(name in each for each in groups)]


def _attributes(optimizer: torch.optim.Optimizer, matters: Matters) -> ChangeCheck:
    """Return the check of attributes, and about entries that not all groups had."""
    known = {"params", *_entries(optimizer)}
    hooks = [present_hooks(member) for member in members_of(optimizer)]

    def read() -> dict[str, Any]:
        own = {
            f"{name} of the optimizer": value
            for member in members_of(optimizer)
            for name, value in vars(member).items()
            if name not in _BOOKKEEPING and not name.startswith("_")
        }
        groups = {
            f"{name} of the optimizer's group {index}": value
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in known
        }
        used = {name: value for each in hooks for name, value in constants_of(each).items()}
        return own | groups | used

    def keep(held: dict[str, Any]) -> dict[str, Any]:
        return {name: _copied(value) for name, value in held.items()}

    def changes(before: dict[str, Any]) -> Iterator[str]:
        if matters():
            yield from _differences(before, keep(read()))

    return ChangeCheck(lambda: keep(read()), changes, _NUMBERS, lambda held: held)


def _comparable(value: Any) -> Any:
    """Return a value, or a text if it is or contains an object that may change."""
    return value if is_plain(value) else contents_of(value)


def _copied(value: Any) -> Any:
    """Return a copy whose value does not change; of other objects, the text of their fields."""
    if isinstance(value, VariableAttributes):
        return sorted(value._variable_attributes)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict | set | deque):
        return copy.copy(value)
    return value if is_plain(value) else contents_of(value, depth=1)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, _GONE), now.get(name, _GONE)
        if old is _GONE:
            yield f"{name} is {new}"
        elif new is _GONE:
            yield f"{name} was {old} and was deleted"
        elif not is_same(new, old):
            yield f"{name} was {old} and is {new}"


def _parameters(optimizer: torch.optim.Optimizer, matters: Matters) -> ChangeCheck:
    def identities() -> list[list[int]]:
        return [list(map(id, group["params"])) for group in optimizer.param_groups]

    def changes(before: list[list[int]]) -> Iterator[str]:
        if not matters():
            return
        now = identities()
        if len(now) != len(before):
            counts = f"was {len(before)} and is {len(now)}"
            yield f"the number of the optimizer's parameter groups {counts}"
        for index, (old, new) in enumerate(zip(before, now, strict=False)):
            gone, come = len({*old} - {*new}), len({*new} - {*old})
            if gone or come:
                yield f"group {index} of the optimizer lost {gone} and gained {come} parameters"

    return ChangeCheck(identities, changes, _PARAMETERS)


def _steps(optimizer: torch.optim.Optimizer) -> ChangeCheck:
    """Return the check of hooks around a step and replacements of it."""

    def changes(before: list[Any]) -> Iterator[str]:
        new = [each for each in _around(optimizer) if each not in before]
        hooks = [each for each in new if each[0] != "step"]
        if hooks:
            yield f"{len(hooks)} hook{'s' * (len(hooks) != 1)} of the optimizer's step"
        if len(hooks) < len(new):
            yield f"step() of {class_of(optimizer).__name__}"

    return ChangeCheck(lambda: list(_around(optimizer)), changes, _STEPS)


def _around(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield everything that calling ``step`` would run, with its place, except torch's own
    hooks.
    """
    for member in members_of(optimizer):
        yield "step", type(member).step
        step = vars(member).get("step")
        if getattr(step, "__globals__", {}).get("__name__") == _SCHEDULERS:
            step = _watched_by_scheduler(step, member)
        if step is not None:
            yield "step", step
        hooks = present_hooks(member)
        yield from (("before", hook) for hook in hooks.before)
        yield from (("after", hook) for hook in hooks.after)


def _watched_by_scheduler(step: Any, member: torch.optim.Optimizer) -> Any:
    """Return a scheduler's wrapper that only counts calls, or None for the ``step`` of the
    class.
    """
    inner = step.__wrapped__
    return None if inner is type(member).step else inner


def warn_of_steps(optimizer: torch.optim.Optimizer) -> None:
    """Warn about parts of an optimizer that do not run."""
    around = [*_around(optimizer)]
    own = {type(member).step for member in members_of(optimizer)}
    replaced = [step for place, step in around if place == "step" and step not in own]
    if replaced:
        names = shorten([getattr(step, "__qualname__", repr(step)) for step in replaced])
        log.python.warning(
            "The optimizer's step() was replaced, and the replacement does "
            f"not run ({names}): {_STEPS}"
        )
