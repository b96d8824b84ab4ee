"""LAMB: AdamW's direction, as long per tensor as the weight allows."""

from __future__ import annotations

import torch

from .._ir.bundle import ALIGNMENT
from .._ir.optim_spec import OptimGroup, OptimSpec
from . import adam
from .algorithm import Algorithm, Tensors, Value, Values, is_constant, plus_scaled


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Values, count: torch.Tensor | None
) -> dict[str, Value]:
    prepared = adam.prepare(spec, group, hyper, count)
    prepared |= {"descent": -hyper["lr"], "max_weight_norm": hyper["max_weight_norm"]}
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Values
) -> tuple[torch.Tensor, Tensors]:
    moments, root = adam.advanced(gradient, moments, values)
    direction = moments["first"] / root
    if "blocks" in values:
        # Padding is 0 / eps; where eps is zero it must not spread NaN through the norms.
        direction = torch.where(root > 0, direction, 0.0)
    if not is_constant(values["first_factor"], 1):
        direction = direction * values["first_factor"]
    if not is_constant(values["weight_decay"], 0):
        direction = plus_scaled(direction, weight, values["weight_decay"])
    blocks = values.get("blocks")
    assert not isinstance(blocks, float)
    trust = _trust(_norms(weight, blocks), _norms(direction, blocks), values["max_weight_norm"])
    return _moved(weight, direction, values["descent"] * trust, blocks), moments


def _trust(long: torch.Tensor, short: torch.Tensor, limit: Value) -> torch.Tensor:
    long = torch.minimum(long, limit) if isinstance(limit, torch.Tensor) else long.clamp(max=limit)
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


def _norms(tensor: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of a weight, or those of the members of a bundle."""
    if blocks is None:
        norm: torch.Tensor = torch.linalg.vector_norm(tensor)
        return norm
    squares = (tensor * tensor).view(-1, ALIGNMENT).sum(1).double()
    sums: torch.Tensor = torch.segment_reduce(squares, "sum", lengths=blocks, unsafe=True)
    return sums.sqrt().to(tensor.dtype)


def _moved(
    weight: torch.Tensor,
    direction: torch.Tensor,
    factor: torch.Tensor,
    blocks: torch.Tensor | None,
) -> torch.Tensor:
    """Return a weight, or a bundle, moved along its direction by its factor, or its members'."""
    factor = factor.as_strided(factor.shape, factor.stride())  # as in ``materialised``
    if blocks is None:
        return torch.addcmul(weight, direction, factor)
    rows = torch.repeat_interleave(factor, blocks, output_size=weight.numel() // ALIGNMENT)
    shape = (-1, ALIGNMENT)
    return torch.addcmul(weight.view(shape), direction.view(shape), rows.unsqueeze(1)).view(-1)


LAMB = Algorithm(adam.moments, adam.counts, _prepare, _step, elementwise=False)
