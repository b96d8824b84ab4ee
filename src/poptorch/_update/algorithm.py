"""What an update algorithm is: state per weight, scalar preparation, a formula over one tensor.

The formulas see tensors of one compute dtype and hyper-parameters that are either Python numbers
(constants, compiled in) or 0-d tensors (variables, inputs). They are pure and are written once for
every backend.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.optim_spec import OptimGroup, OptimSpec

Scalar = float | torch.Tensor
Scalars = Mapping[str, Scalar]
Tensors = dict[str, torch.Tensor]
SQUARES = 2
"""Sums of squares that ``Algorithm.squares`` returns."""


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
        prepare: scalar work done once per group: from the hyper-parameters and, where counted, the
            number of this update (from 1) to the values that ``step`` reads.
        step: weight, descaled gradient, moments and prepared values to the new weight and moments.
        squares: of an algorithm that needs norms of whole weights: from what ``step`` takes to the
            SQUARES sums of squares of which they are roots. Where others have parts of the weight
            ``step`` reads the whole sums as the values ``square_0`` and ``square_1``.
    """

    moments: Callable[[OptimSpec, OptimGroup, torch.dtype], tuple[Moment, ...]]
    counts: Callable[[OptimSpec, OptimGroup], bool]
    prepare: Callable[[OptimSpec, OptimGroup, Scalars, torch.Tensor | None], dict[str, Scalar]]
    step: Callable[[torch.Tensor, torch.Tensor, Tensors, Scalars], tuple[torch.Tensor, Tensors]]
    squares: Callable[[torch.Tensor, torch.Tensor, Tensors, Scalars], list[torch.Tensor]] | None = (
        None
    )


def of_name(name: str) -> Algorithm:
    """Return the algorithm with the name that an OptimSpec has: that of the module of that name."""
    module = importlib.import_module(f"{__package__}.{name}")
    algorithm: Algorithm = module.ALGORITHM
    return algorithm


def is_constant(value: Scalar, number: float) -> bool:
    """Tell whether a hyper-parameter is compiled in with this value, so that terms can go."""
    return not isinstance(value, torch.Tensor) and value == number


def constant(group: OptimGroup, name: str) -> float | None:
    """Return a hyper-parameter of a group that is compiled in, None for an input."""
    return None if name in group.variables else float(group.setting(name) or 0)


def complement(hyper: Scalars, name: str) -> Scalar:
    """Return ``1 - decay``, which is what float32 inputs carry of a decay rate near 1."""
    variable = slots.hyper(name).name
    return hyper[variable] if variable in hyper else 1 - hyper[name]


def correction(hyper: Scalars, name: str, count: torch.Tensor) -> torch.Tensor:
    """Return ``1 - decay ** count`` without the cancellation that it has in float32."""
    rest = complement(hyper, name)
    log = torch.log1p(-rest) if isinstance(rest, torch.Tensor) else _log1p(-rest)
    return -torch.expm1(count * log)


def _log1p(number: float) -> float:
    return math.log1p(number) if number > -1 else -math.inf


def plus_scaled(base: torch.Tensor, other: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """Return ``base + factor * other`` as one op, for a constant and for a variable factor."""
    if isinstance(factor, torch.Tensor):
        return torch.addcmul(base, other, factor)
    return torch.add(base, other, alpha=factor)


def with_decay(gradient: torch.Tensor, weight: torch.Tensor, values: Scalars) -> torch.Tensor:
    """Return the gradient of the loss plus that of the weights' squares, as L2 decay has it."""
    decay = values["weight_decay"]
    return gradient if is_constant(decay, 0) else plus_scaled(gradient, weight, decay)


def blend(old: torch.Tensor, new: torch.Tensor, share: Scalar) -> torch.Tensor:
    """Return ``old + share * (new - old)``."""
    if isinstance(share, torch.Tensor):
        return torch.addcmul(old, new - old, share)
    return torch.lerp(old, new, share)


def materialised(values: dict[str, Scalar]) -> dict[str, Scalar]:
    """Have compilers compute scalars once rather than inside the loops over the weights.

    Inductor inlines 0-d arithmetic (a ``pow``, a division) into every loop that reads it, which
    makes Adam 2.5 times slower; it must give a tensor that ``as_strided`` is applied to a buffer.
    """
    return {
        name: value.as_strided((), ()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def storage_dtype(spec: OptimSpec, setting: str) -> torch.dtype:
    """Return the dtype that a setting such as ``accum_type`` names."""
    dtype = getattr(torch, str(spec.setting(setting)))
    assert isinstance(dtype, torch.dtype)
    return dtype
