"""Compiled parts of forward, and torch's older checkpoints: trained as the plain model is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import poptorch
from helpers.wrapped import normal, options, trained_plainly


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


def by_newer_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def by_nested_checkpoints(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: by_newer_checkpoint(block, x), x, use_reentrant=False)


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
    return list(trained_plainly(net(plainly), X, Y, accumulation).values())


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


def newer() -> nn.Module:
    return net(by_newer_checkpoint)


def nested() -> nn.Module:
    return net(by_nested_checkpoints)


COMPILED = [compiled_model, compiled_block, compiled_in_place, compiled_function]
CHECKPOINTED = [checkpointed, newer, nested]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("make", [*COMPILED, *CHECKPOINTED])
def test_it_trains_as_without(make: Callable[[], nn.Module], accumulation: int) -> None:
    ours = trained(make(), accumulation)
    for own, theirs in zip(ours, expected(accumulation), strict=True):
        torch.testing.assert_close(own, theirs)


class Mixing(nn.Module):
    """Whose parts need what forward is run in: they mix formats, hold weights in a list, count.

    Args:
        again: whether its first part is computed again in the backward pass.
    """

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.again, self.first, self.last = again, nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.held = [self.scale]

    def part(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        halved = self.norm(torch.tanh(self.first(x)).half()) * self.held[0]  # float and half
        labels = nn.functional.one_hot(y.argmax(1), 4)
        with torch.autocast("cpu", torch.bfloat16):
            return halved.float() @ self.first.weight + labels

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = checkpoint(self.part, x, y, use_reentrant=False) if self.again else self.part(x, y)
        out = self.last(out.float())
        return out, nn.functional.mse_loss(out, y)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_what_runs_again_keeps_the_rules_of_the_first_time(accumulation: int) -> None:
    ours, without = trained(Mixing(True), accumulation), trained(Mixing(False), accumulation)
    for own, other, before in zip(ours, without, Mixing(False).parameters(), strict=True):
        torch.testing.assert_close(own, other)
        assert not torch.equal(own, before)


def test_norms_that_run_again_count_as_they_do_in_torch() -> None:
    models = []
    for _ in range(2):
        model = net(by_newer_checkpoint)
        model.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    trained(models[0], 1)
    trained_plainly(models[1], X, Y, 1)
    for own, theirs in zip(*(m.state_dict().values() for m in models), strict=True):
        torch.testing.assert_close(own, theirs)


def test_checkpoints_of_other_threads_are_torchs_own() -> None:
    elsewhere: list[torch.Tensor] = []

    def somewhere_else() -> None:
        x = torch.ones(3, requires_grad=True)
        checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
        elsewhere.append(x.grad)

    def calling(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=somewhere_else)
        thread.start()
        thread.join()
        return by_newer_checkpoint(block, x)

    ours = trained(net(calling), 1)
    for own, theirs in zip(ours, expected(1), strict=True):
        torch.testing.assert_close(own, theirs)
    for gradient in elsewhere:
        torch.testing.assert_close(gradient, torch.ones(3).exp())
    assert elsewhere


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
