"""Describe optimizers without our own formula, so that their ``step`` can be traced.

A parameter group becomes a list of leaves, some of which are numbers, and a structure that is
constant in any case. Numbers are either inputs of the program or constants in it.
``_update.traced_step_function`` finds out which numbers can be inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._base.contents import fields_of
from .._base.errors import AssertionFailure
from .._ir import slots
from .._ir.spec import OptimGroup, OptimSpec, Setting
from .._ir.state_views import WEIGHT, StatePlace, views_among
from .._ir.traced_step import (
    Leaf,
    StepHooks,
    TracedGroup,
    TracedOptimizer,
    TracedParam,
    TracedStep,
    flat,
    of_group,
    of_optimizer,
    structures,
    substituted,
)
from .._residency import unwatched
from .joint import class_of, members_of
from .step_hooks import digest_of, hooks_of

ALIKE = {"foreach": False, "fused": False}
"""Flags that choose between implementations of the same step."""
_NOT_READ = {"params", "param_names"}
_OF_TORCH = {
    "state", "param_groups", "defaults", "step", "loss_scaling", "_opt_called",
    "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_hooks_when_set",
}  # fmt: skip
_REFUSED = {
    "LBFGS": "it calls the model again within a step, until values on the host say that it is done",
    "SparseAdam": "its gradients are sparse, and those of a compiled program are dense",
}
_SIMPLE = (Leaf, bool, int, float, str)
NumbersByPlace = dict[StatePlace, float]


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizer classes whose step cannot be part of a program."""
    whys = [
        _REFUSED[cls.__name__]
        for cls in class_of(optimizer).__mro__
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED
    ]
    inner = [
        name
        for member in members_of(optimizer)
        for name, value in vars(member).items()
        if name not in _OF_TORCH and any(map(_is_optimizer, flat(value, every=True).values()))
    ]
    if inner:
        whys.append(f"its attribute '{inner[0]}' is an optimizer with its own state")
    if _needs_closure(class_of(optimizer)):
        whys.append("its step needs a closure, which calls the model again within a step")
    if whys:
        raise AssertionFailure(
            "Unsupported optimizer type",
            got=f"{full_name(class_of(optimizer))}: {whys[0]}",
            fix=(
                "use another optimizer of torch.optim or poptorch.optim, or train without poptorch"
            ),
        )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _needs_closure(cls: type[torch.optim.Optimizer]) -> bool:
    _, *given = inspect.signature(cls.step).parameters.values()
    named = (each for each in given if each.kind is not each.VAR_KEYWORD)
    return any(
        each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in named
    )


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def traced_step(
    optimizer: torch.optim.Optimizer, path_of: Callable[[Any], str | None]
) -> TracedStep:
    """Return what is needed to trace the step of one or several optimizers."""
    groups: list[TracedGroup] = []
    optimizers: list[TracedOptimizer] = []
    numbers: NumbersByPlace = {}
    places: dict[int, list[StatePlace]] = {}  # by the id of the tensor in each place
    tensors: dict[StatePlace, torch.Tensor] = {}  # weights and their state
    for number, member in enumerate(members_of(optimizer)):
        first = len(groups)
        state: dict[str, Any] = {}
        for group in member.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            params = tuple(
                _param(each, path_of(each) or "", name)
                for each, name in zip(group["params"], names, strict=True)
            )
            owner = of_group(len(groups))
            groups.append(TracedGroup(_values_of(group, owner, numbers), params))
            _note_places({n: v for n, v in group.items() if n not in _NOT_READ}, owner, places)
            for parameter, known in zip(group["params"], params, strict=True):
                entry = dict.get(member.state, parameter)
                if entry and known.path:
                    tensors[known.path, WEIGHT] = parameter
                    tensors |= _tensors(dict(entry), known.path)
                    state[known.path] = _leaves(dict(entry), known.path, numbers, str)
        traced = {name: value for name, value in vars(member).items() if name not in _OF_TORCH}
        attributes = _leaves(traced, of_optimizer(number), numbers, _is_rate)
        _note_places(traced, of_optimizer(number), places)
        attributes["defaults"] = {**member.defaults, **ALIKE}
        indices = tuple(range(first, len(groups)))
        hooks = hooks_of(member)
        optimizers.append(TracedOptimizer(type(member), attributes, indices, state, hooks))
    shared: dict[StatePlace, StatePlace] = {}
    for place, *others in places.values():
        if others:
            shared |= {place: others[0], **dict.fromkeys(others, place)}
    views = unwatched(views_among, tensors)
    return TracedStep(tuple(optimizers), tuple(groups), numbers, shared=shared, first_views=views)


def _tensors(values: Mapping[str, Any], owner: str) -> dict[StatePlace, torch.Tensor]:
    held = flat(values).items()
    return {(owner, name): each for name, each in held if isinstance(each, torch.Tensor)}


def _note_places(
    values: Mapping[str, Any], owner: str, places: dict[int, list[StatePlace]]
) -> None:
    for name, value in flat(values).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            places.setdefault(id(value), []).append((owner, name))


def _values_of(group: Mapping[str, Any], owner: str, numbers: NumbersByPlace) -> dict[str, Any]:
    values = {name: value for name, value in group.items() if name not in _NOT_READ}
    values |= {name: value for name, value in ALIKE.items() if name in values}
    return _leaves(values, owner, numbers, _is_rate)  # type: ignore[no-any-return]


def _param(parameter: Any, path: str, name: str | None) -> TracedParam:
    return TracedParam(
        path if parameter.requires_grad else "",
        tuple(parameter.shape),
        parameter.dtype,
        dict(getattr(parameter, "__dict__", {})),
        id(parameter),
        name,
        parameter.is_contiguous(),
        unwatched(_is_part, parameter),
        parameter.requires_grad,
    )


def _is_part(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    is_larger = tensor.untyped_storage().nbytes() > tensor.nbytes
    return is_larger or tensor.storage_offset() > 0


def _is_rate(name: str) -> bool:
    """Return whether an integer is a rate, which may change. Most other integers count
    something.
    """
    return name == "lr"


def _leaves(value: Any, owner: str, numbers: NumbersByPlace, whole: Callable[[str], Any]) -> Any:
    """Return nested values with leaves in place of tensors and numbers.

    ``whole`` says by name whether an integer also becomes a leaf.
    """

    def leaf(name: str, each: Any) -> Any:
        if isinstance(each, torch.nn.Parameter):
            return each  # a run takes the tensor that represents it
        if isinstance(each, torch.Tensor):
            if each.numel() == 1 and not each.is_complex():
                numbers[owner, name] = float(each)
            return Leaf(name, tuple(each.shape), each.dtype)
        numbers[owner, name] = float(each)
        if isinstance(each, int) and not whole(name):
            return each
        return Leaf(name, (), torch.float64, "int" if isinstance(each, int) else "float")

    return substituted(value, "", leaf)


def frozen_like(
    traced: TracedStep, compiled: OptimSpec, index: int, group: OptimGroup
) -> OptimGroup:
    """Return a group with the same constants and variables as the compiled group."""
    if index >= len(compiled.groups):
        return group
    like, owner = compiled.groups[index], of_group(index)
    held = traced.groups[index].values
    values = flat(held, every=True) | structures(held)
    settings = tuple(
        (name, traced.constant((owner, name), values[name]))
        for name, _ in like.settings
        if name in values
    )
    variables = tuple(n for n in like.variables if isinstance(values.get(n), Leaf))
    return OptimGroup(group.params, settings, variables)


def traced_settings(traced: TracedStep, compiled: OptimSpec | None) -> dict[str, Setting]:
    """Return the attributes of the optimizer objects that are constants of the step.

    Entries of containers and private attributes count only if they exist in the compiled form, too:
    code outside of the step may keep lists that grow there.
    """
    changing = {kept.place for kept in traced.kept or ()}
    found: dict[str, Setting] = {}
    inner: dict[str, Setting] = {}
    for number, optimizer in enumerate(traced.optimizers):
        owner = of_optimizer(number)
        if optimizer.hooks != StepHooks():
            found[f"{owner}.hooks"] = digest_of(optimizer.hooks)
        for name, value in _with_fields(flat(optimizer.attributes, every=True)):
            if isinstance(value, _SIMPLE) and (owner, name) not in changing:
                is_plain = "." not in name and name[:1] != "_"
                (found if is_plain else inner)[f"{owner}.{name}"] = traced.constant(
                    (owner, name), value
                )
    if compiled is not None:
        known = dict(compiled.settings)
        inner = {name: inner.get(name, value) for name, value in known.items() if _is_inner(name)}
    return found | inner


def _with_fields(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values by name, and the fields of objects such as dataclasses."""
    for name, value in values.items():
        yield name, value
        if not isinstance(value, (*_SIMPLE, type, torch.Tensor, torch.nn.Module)):
            yield from ((f"{name}.{key}", each) for key, each in fields_of(value).items())


def _is_inner(setting: str) -> bool:
    """Return whether a setting is an entry of a container, or a private attribute."""
    kind, _, rest = setting.partition(".")
    name = rest.partition(".")[2]
    return kind == "optimizer" and ("." in name or name[:1] == "_")


def traced_values(traced: TracedStep, groups: Sequence[OptimGroup]) -> dict[str, float]:
    """Return the current values of the variables, by key."""
    return {
        slots.traced_hyper(name, index, torch.float64).key: traced.numbers[of_group(index), name]
        for index, group in enumerate(groups)
        for name in group.variables
    }
