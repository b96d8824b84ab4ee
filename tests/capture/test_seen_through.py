"""Compiled parts of forward, and torch's older checkpoints: trained as the plain model is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import poptorch
from helpers.wrapped import normal, options


@pytest.fixture(autouse=True)
def validating() -> Iterator[None]:
    """Compiling anything ends the validation of all distributions' arguments."""
    before = Distribution._validate_args
    yield
    Distribution.set_default_validate_args(before)


X, Y = normal(8, 4), normal(8, 3, seed=1)


class Block(nn.Module):
    """A layer and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    """Which calls its block by a function.

    Args:
        calling: called with the block and its input.
    """

    def __init__(self, calling: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.block, self.last, self.calling = Block(), nn.Linear(4, 3), calling

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.last(self.calling(self.block, x))
        return out, nn.functional.mse_loss(out, y)


def plainly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(block.layer(x))


def by_older_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def net(calling: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Net:
    torch.manual_seed(4)
    return Net(calling)


def trained(model: nn.Module, accumulation: int) -> list[torch.Tensor]:
    """Return the weights after three calls of the wrapped model."""
    opts = options()
    opts.Training.gradientAccumulation(accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, opts, optimizer)
    for _ in range(3):
        training(X, Y)
    return [weight.detach().clone() for weight in model.parameters()]


def expected(accumulation: int) -> list[torch.Tensor]:
    """Return what eager torch makes of them."""
    model = net(plainly)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for x, y in zip(X.chunk(accumulation), Y.chunk(accumulation), strict=True):
            (model(x, y)[1] / accumulation).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


def compiled_model() -> nn.Module:
    return torch.compile(net(plainly))


def compiled_block() -> nn.Module:
    model = net(plainly)
    model.calling = lambda block, x: block(x)
    model.block = torch.compile(model.block)
    return model


def compiled_in_place() -> nn.Module:
    model = net(lambda block, x: block(x))
    model.block.compile()
    return model


def compiled_function() -> nn.Module:
    model = net(plainly)
    model.calling = torch.compile(plainly)
    return model


def checkpointed() -> nn.Module:
    return net(by_older_checkpoint)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "make", [compiled_model, compiled_block, compiled_in_place, compiled_function, checkpointed]
)
def test_it_trains_as_without(make: Callable[[], nn.Module], accumulation: int) -> None:
    ours = trained(make(), accumulation)
    for own, theirs in zip(ours, expected(accumulation), strict=True):
        torch.testing.assert_close(own, theirs)


def test_outside_of_a_capture_checkpoints_are_torchs_own() -> None:
    before = CheckpointFunction.apply
    model = checkpointed()
    twin = copy.deepcopy(model)
    trained(model, 1)
    assert CheckpointFunction.apply == before
    twin(X.requires_grad_(), Y)[1].backward()
    assert twin.block.layer.weight.grad is not None
    X.requires_grad_(False)


def test_a_compiled_model_evaluates() -> None:
    model = net(plainly)
    inference = poptorch.inferenceModel(torch.compile(model), options())
    torch.testing.assert_close(inference(X, Y)[0], model(X, Y)[0])
