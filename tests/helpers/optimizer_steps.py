"""Models trained by each of our optimizers, whose steps are operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options

optim = poptorch.optim
Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "sgd_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd_combined_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
    "adam_step": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "lamb_step": lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
    "rmsprop_step": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}
"""An optimizer for each operator, by the name of the operator."""


def trained(make: Make, layers: int = 2) -> poptorch.PoplarExecutor:
    """Return an executor that has made one call."""
    torch.manual_seed(0)

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).tanh()
        return poptorch.identity_loss(x.square(), "mean")

    model = Having(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(layers)))
    wrapped = poptorch.trainingModel(model, options(), make(model.parameters()))
    wrapped(normal(8, 6))
    return wrapped
