"""An optimizer object -> frozen OptimSpec and a snapshot of its hyper-parameters.

Source: spec/optimizers.md 1, 3 and 4.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue
from .._ir.optim_spec import OptimGroup, OptimSpec, Setting
from . import sgd
from .optimizer import Optimizer, pair_of_betas

HyperValues = dict[str, float]


@dataclass(frozen=True)
class _Type:
    """One accepted optimizer type.

    Attributes:
        hypers: numeric attributes of groups, in the torch spelling.
        references: values that make an attribute of a torch optimizer constant; None for one
            that is always variable. Attributes not listed are always constant.
        structure: (attribute, default) of the optimizer object that shape the update.
        group_structure: attributes of groups that shape the update.
    """

    algorithm: str
    torch_class: type
    classes: tuple[type, ...]
    hypers: tuple[str, ...]
    references: Mapping[str, float | None]
    structure: tuple[tuple[str, Any], ...]
    group_structure: tuple[str, ...] = ("maximize",)


_F32 = torch.float32
_TYPES = (
    _Type(
        "sgd",
        torch.optim.SGD,
        (sgd.SGD,),
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        {"lr": None, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
        (("accum_type", _F32), ("velocity_accum_type", _F32), ("max_grad_norm", math.inf)),
    ),
)
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def freeze(
    optimizer: torch.optim.Optimizer,
    path_of: Mapping[int, str],
    *,
    automatic_loss_scaling: bool = False,
) -> tuple[OptimSpec, HyperValues]:
    """Translate an optimizer into its compiled-in structure and the values that may change.

    Args:
        optimizer: one of this package's, or torch's SGD, Adam, AdamW or RMSprop.
        path_of: ``data_ptr()`` of each of the model's parameters to its path in the program.
            Parameters of the optimizer that are not in it, or need no gradient, are left out.
        automatic_loss_scaling: makes ``loss_scaling`` variable.

    Returns:
        The frozen structure, and ``{"hyper.<group>.<name>" or "hyper.<name>": value}``.

    Raises:
        AssertionError: unsupported type, or a value of the wrong type.
        ValueError: a setting that the update cannot honour.
    """
    kind = _type_of(optimizer)
    _warn_of_subclass(optimizer)
    values: HyperValues = {}
    groups = tuple(
        _freeze_group(optimizer, kind, index, path_of, values)
        for index in range(len(optimizer.param_groups))
    )
    settings: dict[str, Setting] = {}
    for name, default in kind.structure:
        settings[name] = _setting(getattr(optimizer, name, default))
    _check_clipping(settings)
    variables = ()
    scaling = _number("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
    if automatic_loss_scaling or not _is_constant(optimizer, kind, "loss_scaling", scaling):
        variables = ("loss_scaling",)
        values["hyper.loss_scaling"] = scaling
    else:
        settings["loss_scaling"] = scaling
    spec = OptimSpec(kind.algorithm, groups, tuple(sorted(settings.items())), variables)
    return spec, values


def _type_of(optimizer: Any) -> _Type:
    for kind in _TYPES:
        if isinstance(optimizer, (kind.torch_class, *kind.classes)):
            return kind
    raise AssertionFailure(
        "Unsupported optimizer type",
        got=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        fix="use SGD, Adam, AdamW or RMSprop of torch.optim or poptorch.optim, "
        "or poptorch.optim.LAMB",
    )


def _warn_of_subclass(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    if cls in _warned or {torch.optim.Optimizer, Optimizer} & set(cls.__bases__):
        return
    if cls in {kind.torch_class for kind in _TYPES}:
        return
    _warned.add(cls)
    log.python.warning(
        "%s is a subclass of a supported optimizer. The device does not run Python optimizer "
        "code directly: it updates as %s does, and an overridden step() has no effect.",
        cls.__qualname__,
        cls.__bases__[0].__name__,
    )


def _is_constant(optimizer: Any, kind: _Type, name: str, value: float) -> bool:
    if isinstance(optimizer, Optimizer):
        return optimizer.variable_attrs.isConstant(name)
    if name not in kind.references:
        return True
    reference = kind.references[name]
    return reference is not None and value == reference


def _freeze_group(
    optimizer: torch.optim.Optimizer,
    kind: _Type,
    index: int,
    path_of: Mapping[int, str],
    values: HyperValues,
) -> OptimGroup:
    group = optimizer.param_groups[index]
    trained = [p for p in group["params"] if p.requires_grad and p.data_ptr() in path_of]
    params = tuple(dict.fromkeys(path_of[p.data_ptr()] for p in trained))
    settings: dict[str, Setting] = {n: bool(group.get(n, False)) for n in kind.group_structure}
    variables = []
    for name in kind.hypers:
        for part, number, rest in _numbers(name, group[name]):
            if _is_constant(optimizer, kind, name, number):
                settings[part] = number
            else:
                variables.append(rest[0])
                values[f"hyper.{index}.{rest[0]}"] = rest[1]
    return OptimGroup(params, tuple(sorted(settings.items())), tuple(variables))


def _numbers(name: str, value: Any) -> list[tuple[str, float, tuple[str, float]]]:
    """Split an attribute into (constant's name, its value, (input's name, its value)).

    A decay rate near 1 is handed over as its complement, which float32 holds precisely.
    """
    if name == "betas":
        betas = pair_of_betas(value)
        return [(f"beta{i}", b, (f"one_minus_beta{i}", 1 - b)) for i, b in enumerate(betas, 1)]
    number = _number(name, value)
    if name == "alpha":
        return [(name, number, (f"one_minus_{name}", 1 - number))]
    return [(name, number, (name, number))]


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise AssertionFailure(f"Expected a number for {name}", got=repr(value))
    return float(value)


def _setting(value: Any) -> Setting:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _check_clipping(settings: dict[str, Setting]) -> None:
    if "max_grad_norm" not in settings:
        return
    norm = settings["max_grad_norm"] = _number("max_grad_norm", settings["max_grad_norm"])
    if math.isnan(norm):
        raise InvalidValue("max_grad_norm cannot be NaN", fix="use infinity for no clipping")
    if norm < 0:
        raise InvalidValue("max_grad_norm cannot be negative", got=str(norm))
