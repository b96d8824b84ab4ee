"""LAMB: AdamW's direction, as long per tensor as the weight allows."""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from . import adam
from .algorithm import SQUARES, Algorithm, Scalar, Scalars, Tensors, is_constant, plus_scaled


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    prepared = adam.prepare(spec, group, hyper, count)
    prepared |= {"descent": -hyper["lr"], "max_weight_norm": hyper["max_weight_norm"]}
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    moments, direction = _direction(weight, gradient, moments, values)
    if "square_0" in values:  # of the whole weight, of which this is a part
        norms = [torch.sqrt(torch.as_tensor(values[f"square_{i}"])) for i in range(SQUARES)]
    else:
        norms = [torch.linalg.vector_norm(each) for each in (weight, direction)]
    trust = _trust(norms[0], norms[1], values["max_weight_norm"])
    factor = (values["descent"] * trust).as_strided((), ())  # as in ``materialised``
    return torch.addcmul(weight, direction, factor), moments


def _squares(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> list[torch.Tensor]:
    moments, direction = _direction(weight, gradient, moments, values)
    # Behind the last element of a weight there is padding: with an eps of 0, it is 0 / 0.
    nothing = (moments["first"] == 0) & (moments["second"] == 0) & (weight == 0)
    direction = torch.where(nothing, 0.0, direction)
    return [(each * each).sum() for each in (weight, direction)]


def _direction(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[Tensors, torch.Tensor]:
    """Return the new moments, and where they and the decay lead."""
    moments, root = adam.advanced(gradient, moments, values)
    direction = moments["first"] / root
    if not is_constant(values["first_factor"], 1):
        direction = direction * values["first_factor"]
    if not is_constant(values["weight_decay"], 0):
        direction = plus_scaled(direction, weight, values["weight_decay"])
    return moments, direction


def _trust(long: torch.Tensor, short: torch.Tensor, limit: Scalar) -> torch.Tensor:
    long = torch.minimum(long, limit) if isinstance(limit, torch.Tensor) else long.clamp(max=limit)
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


ALGORITHM = Algorithm(adam.moments, adam.counts, _prepare, _step, _squares)
