"""LAMB: AdamW's direction, as long per tensor as the weight allows."""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from . import adam
from .algorithm import Algorithm, Scalar, Scalars, Tensors, is_constant, plus_scaled


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    prepared = adam.prepare(spec, group, hyper, count)
    prepared |= {"descent": -hyper["lr"], "max_weight_norm": hyper["max_weight_norm"]}
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    moments, root = adam.advanced(gradient, moments, values)
    direction = moments["first"] / root
    if not is_constant(values["first_factor"], 1):
        direction = direction * values["first_factor"]
    if not is_constant(values["weight_decay"], 0):
        direction = plus_scaled(direction, weight, values["weight_decay"])
    norm = torch.linalg.vector_norm
    trust = _trust(norm(weight), norm(direction), values["max_weight_norm"])
    factor = (values["descent"] * trust).as_strided((), ())  # as in ``materialised``
    return torch.addcmul(weight, direction, factor), moments


def _trust(long: torch.Tensor, short: torch.Tensor, limit: Scalar) -> torch.Tensor:
    long = torch.minimum(long, limit) if isinstance(limit, torch.Tensor) else long.clamp(max=limit)
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


ALGORITHM = Algorithm(adam.moments, adam.counts, _prepare, _step)
