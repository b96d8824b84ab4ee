"""Describe an optimizer whose own ``step`` is traced, and what was found out about it.

Values of the user's object are nested: dicts, lists and tuples. Tensors and numbers in them are
named by their path, for example ``betas.0``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._base.contents import contents_of
from .slots import Slot
from .state_views import StatePlace, Views

Give = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Leaf:
    """Represents a tensor or a Python number in nested values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: str = ""  # "int" or "float" for a Python number


@dataclass(frozen=True)
class KeptValue:
    """A value that the step keeps from one update to the next."""

    slot: Slot
    owner: str  # the path of the weight whose state it belongs to; or "group.0", "optimizer.0"
    leaf: Leaf
    initial: complex | None  # value before the first step; None if the step computes it
    made: bool  # it is created by the first step

    @property
    def place(self) -> StatePlace:
        return self.owner, self.leaf.name


@dataclass(frozen=True)
class TracedParam:
    path: str  # "" if it is not in the model, or is not trained
    shape: tuple[int, ...]
    dtype: torch.dtype
    attributes: Mapping[str, Any]
    identity: int = 0  # id of the user's tensor; 0 if this represents several tensors
    name: str | None = None  # in the user's group, if the optimizer got named parameters
    is_contiguous: bool = True  # whether the user's tensor is, as all weights of a program are
    is_part: bool = False  # whether the user's tensor is a part of a larger one in memory
    requires_grad: bool = True  # whether the user's tensor does


@dataclass(frozen=True)
class TracedGroup:
    """A copy of a parameter group, with leaves in place of tensors and numbers."""

    values: Mapping[str, Any]
    params: tuple[TracedParam, ...]


@dataclass(frozen=True)
class StepHooks:
    """What runs before and after each step, in this order."""

    before: tuple[Callable[..., Any], ...] = ()
    after: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True)
class TracedOptimizer:
    """One of the user's optimizers, from which another one over other tensors can be made."""

    cls: type
    attributes: Mapping[str, Any]
    groups: tuple[int, ...]  # indices of its groups in the TracedStep
    state: Mapping[str, Any]  # existing state, by path of a parameter
    hooks: StepHooks = StepHooks()


@dataclass(frozen=True)
class TracedStep:
    """An optimizer whose own ``step`` is traced."""

    optimizers: tuple[TracedOptimizer, ...]
    groups: tuple[TracedGroup, ...]
    numbers: Mapping[
        StatePlace, float
    ]  # present values of numbers, and of tensors with one element
    layouts: Mapping[str, Any] = field(default_factory=dict)  # structure of the state, by weight
    kept: tuple[KeptValue, ...] | None = None  # None until it was found out
    shared: Mapping[StatePlace, StatePlace] = field(default_factory=dict)
    """For each place of a tensor that is in several places, another one of these."""
    first_views: Views = field(default_factory=dict)  # views of the state before the first step
    views: Views = field(default_factory=dict)  # views of the state after each step
    differs_at_first: bool = False  # whether the first step differs from later ones
    # equal for weights with equal updates
    signatures: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    """For each weight, the one whose update is used for it, which may be itself; empty if
    unknown.
    """

    def of_examples(self) -> TracedStep:
        """Return a step without the weights for which the update of another one is used."""
        others = {path for path, example in self.examples.items() if path != example}
        groups = tuple(
            replace(group, params=tuple(each for each in group.params if each.path not in others))
            for group in self.groups
        )
        return replace(self, groups=groups)

    def constant(self, place: StatePlace, value: Any) -> bool | int | float | str | None:
        """Return a value of the user's object as a setting."""
        if isinstance(value, Leaf):
            return self.numbers.get(place, repr(value))
        is_simple = isinstance(value, bool | int | float | str | None)
        return value if is_simple else contents_of(value)


def of_group(index: int) -> str:
    return f"group.{index}"


def of_optimizer(index: int) -> str:
    return f"optimizer.{index}"


def substituted(value: Any, name: str, give: Give, every: bool = False) -> Any:
    """Return nested values in which ``give`` has replaced leaves, tensors and numbers.

    The containers are new ones.

    With ``every``, it also replaces all other values that are not containers.
    """

    def inner(key: Any, each: Any) -> Any:
        return substituted(each, f"{name}.{key}" if name else str(key), give, every)

    if isinstance(value, dict):
        made = copy.copy(value)
        made.update(
            {key: inner(_name(key, at), each) for at, (key, each) in enumerate(value.items())}
        )
        return made
    if isinstance(value, deque):
        return deque([inner(at, each) for at, each in enumerate(value)], value.maxlen)
    if isinstance(value, list | tuple):
        items = [inner(at, each) for at, each in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    is_bool = isinstance(value, bool)
    if every or (not is_bool and isinstance(value, Leaf | torch.Tensor | int | float)):
        return give(name, value)
    return value


def _name(key: Any, at: int) -> Any:
    """Return what names an entry: of parameters, which have no names, the place of the entry."""
    return at if isinstance(key, torch.Tensor) else key


def flat(value: Any, name: str = "", every: bool = False) -> dict[str, Any]:
    """Return leaves, tensors and numbers in nested values, by name."""
    result: dict[str, Any] = {}

    def take(inner: str, each: Any) -> Any:
        result[inner] = each
        return each

    substituted(value, name, take, every)
    return result


def structures(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each entry that is a container: which containers and keys are in it."""
    found = {name: _structure(each) for name, each in values.items()}
    return {name: text for name, text in found.items() if text != _LEAF}


_LEAF = "_"


def _structure(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_structure(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | deque):
        return "[" + ", ".join(map(_structure, value)) + "]"
    return contents_of(value) if isinstance(value, set | frozenset) else _LEAF


def leaves_of(value: Any) -> Iterator[Leaf]:
    return (each for each in flat(value).values() if isinstance(each, Leaf))
