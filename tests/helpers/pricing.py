"""What models of tests cost on IPUs: their weights and batches are on the meta device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import poptorch
from poptorch.executor import Repricer


class Stack(nn.Module):
    """Linear layers of equal width, from each cut on on a further chip, and a loss in training."""

    def __init__(self, layers: int, wide: int, *cuts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(layers))
        for ipu, cut in enumerate(cuts, 1):
            poptorch.BeginBlock(self.layers[cut], f"b{ipu}", ipu_id=ipu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return poptorch.identity_loss(x, reduction="mean") if self.training else x


def two_stages() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    poptorch.BeginBlock(model[1], "b", ipu_id=1)
    return model


def wrapped(
    make: Callable[..., Any],
    steps: int | None = None,
    optimizer: str = "",
    options: poptorch.Options | None = None,
    **settings: Any,
) -> poptorch.PoplarExecutor:
    """Wrap a model: with the name of an optimizer for training, whose steps are accumulation."""
    options = options or poptorch.Options()
    if steps is not None and optimizer:
        options.Training.gradientAccumulation(steps)
    elif steps is not None:
        options.deviceIterations(steps)
    with torch.device("meta"):
        model = make().train(bool(optimizer))
    if not optimizer:
        return poptorch.inferenceModel(model, options)
    made = getattr(poptorch.optim, optimizer)(model.parameters(), lr=0.1, **settings)
    return poptorch.trainingModel(model, options, made)


def priced(
    make: Callable[..., Any], *batch: Any, system: str = "bow:4", advice: bool = False, **how: Any
) -> poptorch.Estimate:
    """Return the estimate of a model that is wrapped so."""
    return price(wrapped(make, **how), *batch, system=system, advice=advice)


def price(
    executor: poptorch.PoplarExecutor, *batch: Any, system: str, advice: bool = False
) -> poptorch.Estimate:
    """Return an estimate and destroy the executor; without advice it takes a fraction."""
    advised = nullcontext() if advice else patch.object(Repricer, "advised", lambda _, made: made)
    try:
        with advised:
            return executor.estimate(*batch, system=system)
    finally:
        executor.destroy()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fullest(estimate: poptorch.Estimate) -> float:
    return max(chip.bytes for chip in estimate.chips)


def off_chip(kind: str) -> poptorch.Options:
    options, where = poptorch.Options(), poptorch.TensorLocationSettings().useOnChipStorage(False)
    getattr(options.TensorLocations, f"set{kind}Location")(where)
    return options
