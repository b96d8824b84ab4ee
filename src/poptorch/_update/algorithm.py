"""What an update algorithm is: state per weight, scalar preparation, a formula over one tensor.

The formulas see tensors of one compute dtype and hyper-parameters that are either Python numbers
(constants, compiled in) or 0-d tensors (variables, inputs). They are pure and are written once for
every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec

Value = float | torch.Tensor
Values = Mapping[str, Value]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Moment:
    """One state tensor per weight, of the weight's shape.

    Attributes:
        name: its place in ``optstate.<name>.<weight>``.
        dtype: element type between updates.
        initial: the value it starts with.
    """

    name: str
    dtype: torch.dtype
    initial: float = 0.0


@dataclass(frozen=True)
class Algorithm:
    """One update algorithm.

    Attributes:
        moments: the state that a weight of the given dtype needs in a group.
        counts: whether the group needs the number of updates made so far.
        prepare: scalar work done once per group: hyper-parameters and, where counted, the number
            of this update (from 1) to the values that ``step`` reads.
        step: weight, descaled gradient, moments and prepared values to the new weight and moments.
    """

    moments: Callable[[OptimSpec, OptimGroup, torch.dtype], tuple[Moment, ...]]
    counts: Callable[[OptimSpec, OptimGroup], bool]
    prepare: Callable[[Values, torch.Tensor | None], Values]
    step: Callable[[torch.Tensor, torch.Tensor, Tensors, Values], tuple[torch.Tensor, Tensors]]


def is_zero(value: Value) -> bool:
    """Tell whether a hyper-parameter is a constant zero, so that its term can be left out."""
    return not isinstance(value, torch.Tensor) and value == 0


def plus_scaled(base: torch.Tensor, other: torch.Tensor, factor: Value) -> torch.Tensor:
    """Return ``base + factor * other`` as one op, for a constant and for a variable factor."""
    if isinstance(factor, torch.Tensor):
        return torch.addcmul(base, other, factor)
    return torch.add(base, other, alpha=factor)


def storage_dtype(spec: OptimSpec, setting: str) -> torch.dtype:
    """Return the dtype that a setting such as ``accum_type`` names."""
    dtype = getattr(torch, str(spec.setting(setting)))
    assert isinstance(dtype, torch.dtype)
    return dtype
