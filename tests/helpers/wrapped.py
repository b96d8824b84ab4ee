"""What the tests of wrapped models share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

import poptorch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same in every run, for modules of tests to hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def options(**counts: int) -> poptorch.Options:
    """Quick options: the reference backend, no progress bar, loop counts."""
    opts = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    opts.deviceIterations(counts.get("iterations", 1))
    opts.replicationFactor(counts.get("replicas", 1))
    opts.Training.gradientAccumulation(counts.get("accumulation", 1))
    return opts


class Regression(nn.Module):
    """A layer; with targets, its mean squared error."""

    def __init__(self, inputs: int = 4, outputs: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x, y=None):
        out = self.layer(x)
        return out if y is None else nn.functional.mse_loss(out, y)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def inference(function, **counts: int) -> poptorch.PoplarExecutor:
    """Wrap a function or a module for inference."""
    module = function if isinstance(function, nn.Module) else Function(function)
    return poptorch.inferenceModel(module, options(**counts))


@contextlib.contextmanager
def compilations() -> Iterator[list[int]]:
    """Fill a list with an entry for each program that is compiled meanwhile."""
    compiled: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compiled.append(1))
    try:
        yield compiled
    finally:
        handle.remove()
