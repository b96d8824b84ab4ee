"""Translate an optimizer into an immutable ``OptimSpec``. This decides whether one of our formulas
computes its step or the step is traced, and which hyper-parameters are constants.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue
from .._ir import slots
from .._ir.spec import OptimGroup, OptimSpec, Setting
from .._ir.traced_step import StepHooks, TracedStep
from .._residency import unwatched
from . import KINDS
from .adam import ADAMW
from .arguments import number, pair_of_betas
from .joint import class_of, members_of
from .kind import DECOUPLED, OptimizerKind, agreed, flags_of
from .optimizer import Optimizer
from .step_hooks import hooks_of, refuse_hooks
from .traced_optimizer import (
    frozen_like,
    full_name,
    refuse,
    traced_settings,
    traced_step,
    traced_values,
)

HyperValues = dict[str, float]
_NO_PART_OF_A_STEP = {
    "__init__", "__doc__", "__module__", "__qualname__", "__repr__", "__dict__", "__weakref__",
    "__annotations__", "__firstlineno__", "__static_attributes__", "_zero_grad_profile_name",
    "state_dict", "load_state_dict", "add_param_group", "zero_grad", "__setstate__", "__getstate__",
}  # fmt: skip
_NEED_A_FORMULA = (
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
    "velocity_scaling",
    "use_combined_accum",
    "use_tf_variant",
)
_NOT_ON_CPUS = ("capturable", "differentiable")
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; on the meta device, a unique number."""
    return id(tensor) if tensor.is_meta else tensor.data_ptr()


def path_of(tensor: torch.Tensor, paths: Mapping[int, str]) -> str | None:
    """Return the path of a parameter. Parameters are compared by identity, and tensors that
    replace them by address.
    """
    return paths.get(id(tensor)) or paths.get(unwatched(address, tensor))


def freeze(
    optimizer: torch.optim.Optimizer,
    paths: Mapping[int, str],
    *,
    automatic_loss_scaling: bool = False,
    compiled: OptimSpec | None = None,
) -> tuple[OptimSpec, HyperValues]:
    """Translate an optimizer into the structure that is compiled and the values that may change.

    Parameters that ``path_of`` does not find in ``paths`` are left out. With ``compiled``, a torch
    optimizer continues that structure: its variables stay variable, and a constant with another
    value becomes variable. Otherwise only zeros that switch a term off are constant.
    """
    kind = _kind_of(optimizer)
    _refuse_flags(optimizer)
    traced = None
    values: HyperValues = {}
    if kind is None:
        settings, groups, traced = _freeze_traced(optimizer, paths, compiled)
        values |= traced_values(traced, groups)
        algorithm = full_name(class_of(optimizer))
    else:
        _warn_of_subclass(optimizer)
        settings = _structure(optimizer, kind)
        groups = tuple(
            _freeze_group(optimizer, kind, index, paths, values, compiled)
            for index in range(len(optimizer.param_groups))
        )
        algorithm = kind.algorithm
    variables: tuple[str, ...] = ()
    scaling = number("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
    if automatic_loss_scaling or not _is_constant(optimizer, "loss_scaling", "", scaling, None):
        variables = (slots.LOSS_SCALING.name,)
        values[slots.LOSS_SCALING.key] = scaling
    else:
        settings["loss_scaling"] = scaling
    constants = tuple(sorted(settings.items()))
    common = _in_common_memory(optimizer, paths)
    return OptimSpec(algorithm, groups, constants, variables, common, traced), values


def _freeze_traced(
    optimizer: torch.optim.Optimizer, paths: Mapping[int, str], compiled: OptimSpec | None
) -> tuple[dict[str, Setting], tuple[OptimGroup, ...], TracedStep]:
    traced = traced_step(optimizer, lambda parameter: path_of(parameter, paths))
    trained = [[param.path for param in group.params if param.path] for group in traced.groups]
    groups = tuple(OptimGroup(tuple(dict.fromkeys(each)), (), ()) for each in trained)
    if compiled is not None and compiled.traced is not None:
        groups = tuple(
            frozen_like(traced, compiled, index, group) for index, group in enumerate(groups)
        )
        known = compiled.traced
        traced = replace(
            traced,
            layouts=known.layouts,
            kept=known.kept,
            first_views=known.first_views,
            views=known.views,
            differs_at_first=known.differs_at_first,
            signatures=known.signatures,
            examples=known.examples,
        )
    needed = [name for name in _NEED_A_FORMULA if hasattr(optimizer, name)]
    if needed:
        raise InvalidValue(
            "An attribute of the optimizer is not available for this optimizer class",
            got=(
                f"{needed[0]} of {full_name(class_of(optimizer))}; this attribute needs an "
                "optimizer with a built-in formula"
            ),
            fix="use SGD, Adam, AdamW, RMSprop or LAMB of poptorch.optim",
        )
    settings: dict[str, Setting] = {"accum_type": "float32", **traced_settings(traced, compiled)}
    if "max_grad_norm" not in inspect.signature(class_of(optimizer)).parameters:
        settings["max_grad_norm"] = _clipping(getattr(optimizer, "max_grad_norm", None))
    return settings, groups, traced


def _in_common_memory(
    optimizer: torch.optim.Optimizer, paths: Mapping[int, str]
) -> tuple[tuple[str, ...], ...]:
    places: dict[int, list[str]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        path = paths.get(id(parameter))
        if path is not None and parameter.requires_grad and parameter.numel():
            places.setdefault(unwatched(address, parameter), []).append(path)
    return tuple(tuple(same) for same in places.values() if len(same) > 1)


def _kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Return the kind of optimizer whose formula is used, or None if the optimizer is traced."""
    for kind in KINDS:
        if issubclass(class_of(optimizer), kind.classes) and _steps_as(optimizer, kind):
            return kind.variant(optimizer) or kind
    if (
        not issubclass(class_of(optimizer), torch.optim.Optimizer)
        or class_of(optimizer) is torch.optim.Optimizer
    ):
        raise AssertionFailure(
            "Unsupported optimizer type",
            got=full_name(class_of(optimizer)),
            fix=(
                "use an optimizer of torch.optim or poptorch.optim, or a subclass of "
                "torch.optim.Optimizer that defines step"
            ),
        )
    refuse(optimizer)
    return None


def _refuse_flags(optimizer: torch.optim.Optimizer) -> None:
    """Refuse flags with which the steps of torch's classes raise an error on a CPU."""
    bases = (cls for cls in class_of(optimizer).__mro__ if cls is not torch.optim.Optimizer)
    is_ours = isinstance(optimizer, Optimizer)
    if is_ours or not any(cls.__module__.startswith("torch.optim.") for cls in bases):
        return
    for index, group in enumerate(optimizer.param_groups):
        for name in _NOT_ON_CPUS:
            if group.get(name, False):
                raise AssertionFailure(
                    "A flag of the optimizer is not available on a CPU",
                    got=(
                        f"{name}=True in parameter group {index} of "
                        f"{full_name(class_of(optimizer))}; eager PyTorch refuses it, too"
                    ),
                    fix=f"remove {name}=True",
                )


def _steps_as(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> bool:
    """Return whether a formula describes the optimizer, because it overrides no part of
    its step.
    """
    if isinstance(optimizer, Optimizer):
        refuse_hooks(optimizer, full_name(class_of(optimizer)))
        return True
    if any(hooks_of(each) != StepHooks() for each in members_of(optimizer)):
        return False
    if any(group.get("amsgrad", False) for group in optimizer.param_groups):
        return False
    if any(len(set(flags_of(optimizer, flag))) > 1 for flag in (*kind.agreed, DECOUPLED)):
        return False
    if kind is ADAMW and not all(flags_of(optimizer, DECOUPLED)):
        return False
    cls = class_of(optimizer)
    base = next(each for each in cls.__mro__ if each in kind.classes)
    derived = cls.__mro__[: cls.__mro__.index(base)]
    names = {name for each in derived for name in vars(each)} - _NO_PART_OF_A_STEP
    return not any(hasattr(base, name) for name in names)


def _structure(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> dict[str, Setting]:
    given = {name: getattr(optimizer, name, value) for name, value in kind.structure.items()}
    settings: dict[str, Setting] = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in given.items()
    }
    if getattr(optimizer, "use_tf_variant", False) and "use_tf_variant" not in settings:
        raise InvalidValue(
            "use_tf_variant is only available with RMSprop",
            got=type(optimizer).__name__,
            fix="remove the attribute use_tf_variant, or use poptorch.optim.RMSprop",
        )
    if any(group.get("amsgrad", False) for group in optimizer.param_groups):
        raise InvalidValue(
            "Only non-amsgrad Adam and AdamW optimizers are supported",
            got=f"{type(optimizer).__name__} with amsgrad=True",
            fix="pass amsgrad=False",
        )
    settings |= {name: agreed(optimizer, name) for name in kind.agreed}
    if "max_grad_norm" in settings:
        settings["max_grad_norm"] = _clipping(given["max_grad_norm"])
    return settings


def _clipping(given: Any) -> float:
    norm = number("max_grad_norm", math.inf if given is None else given)
    if math.isnan(norm):
        raise InvalidValue("max_grad_norm cannot be NaN", fix="use math.inf to disable clipping")
    if norm < 0:
        raise InvalidValue(
            "max_grad_norm cannot be negative",
            got=str(norm),
            fix="use a number of at least 0, or math.inf to disable clipping",
        )
    return norm


def _warn_of_subclass(optimizer: torch.optim.Optimizer) -> None:
    """Warn of overridden steps of our classes. Subclasses of torch's optimizers are traced if they
    override any part of a step.
    """
    cls = class_of(optimizer)
    if not issubclass(cls, Optimizer):
        return
    direct = {torch.optim.Optimizer, Optimizer} & {*cls.__bases__}
    if cls in _warned or direct or any(cls in kind.classes for kind in KINDS):
        return
    _warned.add(cls)
    log.python.warning(
        "%s is a subclass of a supported optimizer. Poptorch does not run Python optimizer "
        "code directly: it updates as %s does, and an overridden step() has no effect.",
        cls.__qualname__,
        cls.__bases__[0].__name__,
    )


def _is_constant(
    optimizer: Any, name: str, part: str, value: float, compiled: OptimGroup | None
) -> bool:
    if isinstance(optimizer, Optimizer):
        return optimizer.variable_attrs.isConstant(name)
    if name == "momentum" and value == 0:
        return True  # torch does not change the buffer as long as this holds
    if compiled is not None and name != "nesterov":
        return part not in compiled.variables and dict(compiled.settings).get(part) == value
    # At zero these remove a term, together with the state and the work that it needs.
    off = name in ("momentum", "dampening", "weight_decay") and value == 0
    return off or name in ("nesterov", "loss_scaling")


def _freeze_group(
    optimizer: torch.optim.Optimizer,
    kind: OptimizerKind,
    index: int,
    paths: Mapping[int, str],
    values: HyperValues,
    compiled: OptimSpec | None,
) -> OptimGroup:
    same = compiled.groups[index] if compiled and index < len(compiled.groups) else None
    group = optimizer.param_groups[index]
    trained = (path_of(p, paths) for p in group["params"] if p.requires_grad)
    params = tuple(dict.fromkeys(path for path in trained if path is not None))
    settings: dict[str, Setting] = {"maximize": bool(group.get("maximize", False))}
    if any(parameter.dtype.to_real() is torch.float64 for parameter in group["params"]):
        settings["wide"] = True
    variables = []
    whole = not isinstance(optimizer, Optimizer) and group.get("momentum") == 0
    for name in kind.hypers:
        value = group[name] if name in group else getattr(optimizer, name)
        if name == "dampening" and whole:
            value = 0.0  # torch dampens only what is added to a momentum, PopTorch every gradient
        if name == "betas":
            numbers = dict(zip(("beta1", "beta2"), pair_of_betas(value), strict=True))
        else:
            numbers = {name: number(name, value)}
        for part, one in numbers.items():
            if _is_constant(optimizer, name, part, one, same):
                settings[part] = one
            else:
                variables.append(part)
                values[slots.hyper(part, index).key] = slots.hyper_value(part, one)
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        raise InvalidValue(
            "Nesterov momentum requires a momentum and zero dampening",
            got=f"momentum={group['momentum']}, dampening={group['dampening']}",
            fix="for example momentum=0.9, dampening=0, nesterov=True",
        )
    return OptimGroup(params, tuple(sorted(settings.items())), tuple(variables))
