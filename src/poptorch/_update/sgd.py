"""Stochastic gradient descent with momentum in its own tensor (PopTorch user guide, "Optimizers").

As in torch, and unlike the original, the first gradient enters the velocity undamped.
"""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from .algorithm import (
    Algorithm,
    Moment,
    Scalar,
    Scalars,
    Tensors,
    constant,
    is_constant,
    plus_scaled,
    storage_dtype,
    with_decay,
)


def _moments(spec: OptimSpec, group: OptimGroup, dtype: torch.dtype) -> tuple[Moment, ...]:
    if constant(group, "momentum") == 0:
        return ()
    return (Moment("velocity", storage_dtype(spec, "velocity_accum_type")),)


def _counts(spec: OptimSpec, group: OptimGroup) -> bool:
    return constant(group, "momentum") != 0 and constant(group, "dampening") != 0


def undamped(hyper: Scalars, count: torch.Tensor | None) -> Scalar:
    """Return the share of a gradient that enters the velocity: all of the first one."""
    rest = 1 - hyper["dampening"]
    return rest if count is None else torch.where(count == 1, 1.0, rest)


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    names = ("weight_decay", "momentum", "nesterov")
    prepared = {name: hyper[name] for name in names}
    share = undamped(hyper, count)
    if constant(group, "momentum") == 0:
        prepared["descent"] = -(hyper["lr"] * share)
        return prepared
    # A half velocity is held multiplied by the loss scale, as the gradients are that feed it.
    in_half = storage_dtype(spec, "velocity_accum_type") == torch.float16
    prepared["scaling"] = hyper["loss_scaling"] if in_half else 1.0
    prepared["share"] = share * prepared["scaling"]
    prepared["descent"] = -(hyper["lr"] / prepared["scaling"])
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    gradient = with_decay(gradient, weight, values)
    if "velocity" not in moments:
        return plus_scaled(weight, gradient, values["descent"]), {}
    velocity = moments["velocity"] * values["momentum"]
    velocity = plus_scaled(velocity, gradient, values["share"])
    if not is_constant(values["scaling"], 1):
        gradient = gradient * values["scaling"]
    direction = looked_ahead(gradient, velocity, values)
    return plus_scaled(weight, direction, values["descent"]), {"velocity": velocity}


def looked_ahead(gradient: torch.Tensor, velocity: torch.Tensor, values: Scalars) -> torch.Tensor:
    """Return the velocity, or with Nesterov momentum where it points after this gradient."""
    nesterov = values["nesterov"]
    if is_constant(nesterov, 0):
        return velocity
    ahead = plus_scaled(gradient, velocity, values["momentum"])
    return (
        torch.where(nesterov > 0, ahead, velocity) if isinstance(nesterov, torch.Tensor) else ahead
    )


ALGORITHM = Algorithm(_moments, _counts, _prepare, _step)
