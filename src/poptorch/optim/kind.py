"""The accepted kinds of optimizers: formula, classes, numbers, documented names of state."""

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

Hypers = Mapping[str, float]  # all of a group, ``loss_scaling`` and decay rates included


@dataclass(frozen=True)
class Shown:
    """One entry of ``ipu_param`` per weight, computed from the group's hyper-parameters."""

    name: str  # as documented
    hyper: str  # the hyper-parameter that a loaded value determines
    show: Callable[[Hypers], float]  # affine in the hyper-parameter

    def read(self, value: float, hypers: Hypers) -> float | None:
        """Return the hyper-parameter that shows as a value; None if it cannot be told."""
        zero, one = (self.show({**hypers, self.hyper: number}) for number in (0.0, 1.0))
        return (value - zero) / (one - zero) if one != zero else None


def as_it_is(name: str, hyper: str) -> Shown:
    return Shown(name, hyper, operator.itemgetter(hyper))


@dataclass(frozen=True)
class Kind:
    """One accepted kind of optimizer."""

    algorithm: str  # its name in OptimSpec and in the table of formulas
    classes: tuple[type, ...]  # torch's first where there is one
    hypers: tuple[str, ...]  # numeric attributes of groups
    structure: Mapping[str, Any]  # attributes that shape the update; what torch's stand for
    moments: Mapping[str, str]  # the formula's, by the documented prefixes in ``ipu_state``
    shown: Callable[[Mapping[str, Setting]], Sequence[Shown]]  # by a group's constant settings
    agreed: tuple[str, ...] = ()  # flags that shape the update, the same in all groups
    variant: Callable[[torch.optim.Optimizer], Kind | None] = lambda optimizer: None
    """The other kind that an optimizer of these classes may stand for."""


def agreed(optimizer: torch.optim.Optimizer, name: str) -> bool:
    values = {bool(group.get(name, False)) for group in optimizer.param_groups}
    if len(values) > 1:
        raise AssertionFailure(f"All parameter groups must have the same value of {name}")
    return values.pop() if values else False
