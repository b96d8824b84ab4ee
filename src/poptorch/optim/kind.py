"""Describe the supported kinds of optimizers: formula, classes, numbers and documented
names of state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._base.errors import AssertionFailure
from .._ir.spec import Setting

MOMENT_TYPES = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}
CLIPPING = {"max_grad_norm": math.inf}

Hypers = Mapping[str, float]  # all numbers of a group, including ``loss_scaling`` and decay rates


@dataclass(frozen=True)
class Shown:
    """One entry of ``ipu_param`` per weight, computed from the hyper-parameters of its group."""

    name: str  # documented name
    hyper: str  # the hyper-parameter that a loaded value determines
    show: Callable[[Hypers], float]  # an affine function of the hyper-parameter

    def read(self, value: float, hypers: Hypers) -> float | None:
        """Return the hyper-parameter for which a value is shown; None if it is not determined."""
        zero, one = (self.show({**hypers, self.hyper: number}) for number in (0.0, 1.0))
        return (value - zero) / (one - zero) if one != zero else None


def shown_directly(name: str, hyper: str) -> Shown:
    return Shown(name, hyper, operator.itemgetter(hyper))


@dataclass(frozen=True)
class OptimizerKind:
    """One supported kind of optimizer."""

    algorithm: str  # name in OptimSpec and in the table of formulas
    classes: tuple[type, ...]  # torch's class first, if there is one
    hypers: tuple[str, ...]  # numeric attributes of groups
    # attributes that change the form of the update, with the values that torch's classes imply
    structure: Mapping[str, Any]
    moments: Mapping[str, str]  # the formula's names, by the documented prefixes in ``ipu_state``
    # computed from a group's constant settings
    shown: Callable[[Mapping[str, Setting]], Sequence[Shown]]
    # flags that change the form of the update and are equal in all groups
    agreed: tuple[str, ...] = ()
    variant: Callable[[torch.optim.Optimizer], OptimizerKind | None] = lambda optimizer: None
    """The other kind that an optimizer of these classes may be."""


DECOUPLED = "decoupled_weight_decay"
"""The flag by which Adam becomes AdamW in torch."""


def flags_of(optimizer: torch.optim.Optimizer, name: str) -> list[bool]:
    return [bool(group.get(name, False)) for group in optimizer.param_groups]


def agreed(optimizer: torch.optim.Optimizer, name: str) -> bool:
    values = set(flags_of(optimizer, name))
    if len(values) > 1:
        raise AssertionFailure(
            f"All parameter groups must have the same value of {name}",
            fix=f"set {name} to one value in all parameter groups",
        )
    return values.pop() if values else False
