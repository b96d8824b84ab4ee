"""AdamW: Adam with decoupled weight decay (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

import torch

from .adam import advanced, counts, moments, prepare_step
from .algorithm import Algorithm, Scalars, Tensors, is_constant, plus_scaled


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    moments, root = advanced(gradient, moments, values)
    if not is_constant(values["weight_decay"], 0):
        weight = weight * values["shrink"]
    return plus_scaled(weight, moments["first"] / root, values["descent"]), moments


ALGORITHM = Algorithm(moments, counts, prepare_step, _step)
