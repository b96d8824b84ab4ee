"""Stochastic gradient descent with momentum in its own tensor (spec/optimizers.md 5.1 and 5.2).

As in torch, and unlike the original, the first gradient enters the velocity undamped.
"""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from .algorithm import (
    Algorithm,
    Moment,
    Tensors,
    Value,
    Values,
    is_zero,
    plus_scaled,
    storage_dtype,
)


def _constant(group: OptimGroup, name: str) -> float | None:
    """Value of a hyper-parameter that is compiled in, None for an input."""
    return None if name in group.variables else float(group.setting(name) or 0)


def _moments(spec: OptimSpec, group: OptimGroup, dtype: torch.dtype) -> tuple[Moment, ...]:
    if _constant(group, "momentum") == 0:
        return ()
    return (Moment("velocity", storage_dtype(spec, "velocity_accum_type")),)


def _counts(spec: OptimSpec, group: OptimGroup) -> bool:
    return _constant(group, "momentum") != 0 and _constant(group, "dampening") != 0


def _prepare(hyper: Values, count: torch.Tensor | None) -> Values:
    undamped: Value = 1.0 - hyper["dampening"]
    prepared = dict(hyper)
    if is_zero(hyper["momentum"]):
        prepared["descent"] = -(hyper["lr"] * undamped)
        return prepared
    prepared["descent"] = -hyper["lr"]
    if count is not None:
        undamped = torch.where(count == 1, 1.0, undamped)
    prepared["undamped"] = undamped
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Values
) -> tuple[torch.Tensor, Tensors]:
    if not is_zero(values["weight_decay"]):
        gradient = plus_scaled(gradient, weight, values["weight_decay"])
    if "velocity" not in moments:
        return plus_scaled(weight, gradient, values["descent"]), {}
    velocity = moments["velocity"] * values["momentum"]
    velocity = plus_scaled(velocity, gradient, values["undamped"])
    direction = velocity
    nesterov = values["nesterov"]
    if not is_zero(nesterov):
        direction = plus_scaled(gradient, velocity, values["momentum"])
        if isinstance(nesterov, torch.Tensor):
            direction = torch.where(nesterov > 0, direction, velocity)
    return plus_scaled(weight, direction, values["descent"]), {"velocity": velocity}


SGD = Algorithm(_moments, _counts, _prepare, _step)
