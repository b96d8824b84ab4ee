"""Adam, its weight decay in the gradient (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from .algorithm import (
    Algorithm,
    Moment,
    Scalar,
    Scalars,
    Tensors,
    blend,
    complement,
    correction,
    is_constant,
    plus_scaled,
    storage_dtype,
    with_decay,
)


def moments(spec: OptimSpec, group: OptimGroup, dtype: torch.dtype) -> tuple[Moment, ...]:
    """Return the two moments of the gradient."""
    return (
        Moment("first", storage_dtype(spec, "first_order_momentum_accum_type")),
        Moment("second", storage_dtype(spec, "second_order_momentum_accum_type")),
    )


def counts(spec: OptimSpec, group: OptimGroup) -> bool:
    """Tell whether the moments are corrected for their start at zero."""
    return bool(spec.setting("bias_correction"))


def prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    """Return the moments' shares and corrections, as factors of the moments."""
    prepared: dict[str, Scalar] = {name: hyper[name] for name in ("eps", "weight_decay")}
    prepared["first_share"] = complement(hyper, "beta1")
    prepared["second_share"] = complement(hyper, "beta2")
    prepared["first_factor"] = prepared["root_factor"] = 1.0
    if count is not None:
        prepared["first_factor"] = 1 / correction(hyper, "beta1", count)
        prepared["root_factor"] = torch.rsqrt(correction(hyper, "beta2", count))
    return prepared


def advanced(
    gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[Tensors, torch.Tensor]:
    """Return the new moments and the corrected root of the second, plus eps."""
    first = blend(moments["first"], gradient, values["first_share"])
    second = blend(moments["second"], gradient * gradient, values["second_share"])
    root = torch.sqrt(second)
    if not is_constant(values["root_factor"], 1):
        root = root * values["root_factor"]
    return {"first": first, "second": second}, root + values["eps"]


def prepare_step(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    """Return what ``prepare`` does, the step's length and what decay leaves."""
    prepared = prepare(spec, group, hyper, count)
    prepared["descent"] = -(hyper["lr"] * prepared["first_factor"])
    prepared["shrink"] = 1 - hyper["lr"] * hyper["weight_decay"]
    return prepared


def _adam(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    gradient = with_decay(gradient, weight, values)
    moments, root = advanced(gradient, moments, values)
    return plus_scaled(weight, moments["first"] / root, values["descent"]), moments


ALGORITHM = Algorithm(moments, counts, prepare_step, _adam)
