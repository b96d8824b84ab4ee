"""What the tests of wrapped models share."""

import contextlib
import io

import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, options


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same in every run, for modules of tests to hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(value, weights_only: bool = True):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


class Graded(nn.Module):
    """Layers by name, one after another; with targets, the loss, after the output if ``both``."""

    def __init__(self, loss=nn.functional.mse_loss, both: bool = False, **layers: nn.Module):
        super().__init__()
        self.loss, self.both, self.order = loss, both, tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x, y=None):
        for name in self.order:
            x = self.get_submodule(name)(x)
        if y is None:
            return x
        return (x, self.loss(x, y)) if self.both else self.loss(x, y)


class Regression(Graded):
    """A layer and its mean squared error."""

    def __init__(self, inputs: int = 4, outputs: int = 2) -> None:
        super().__init__(layer=nn.Linear(inputs, outputs))


def inference(function, **counts: int) -> poptorch.PoplarExecutor:
    module = function if isinstance(function, nn.Module) else Calling(function)
    return poptorch.inferenceModel(module, options(**counts))


@contextlib.contextmanager
def compilations():
    """Fill a list with an entry for each program that is compiled meanwhile."""
    compiled: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compiled.append(1))
    try:
        yield compiled
    finally:
        handle.remove()
