"""``train()`` and ``eval()`` between calls: a program for each mode, over the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options

X, Y = normal(8, 4), normal(8, 4, seed=1)


class Net(nn.Module):
    """Statistics, a mode that the module itself looks at, a sub-module's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        out = self.norm(self.linear(x))
        if self.training:
            out = out * 2
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(X, Y)[1]
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_training_and_validating_follow_the_mode(backend: str) -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    settings = {"lr": 0.1, "momentum": 0.9}
    theirs = torch.optim.SGD(eager.parameters(), **settings)
    ours = torch.optim.SGD(model.parameters(), **settings)
    training = poptorch.trainingModel(model, options().backend(backend), ours)
    inference = poptorch.inferenceModel(model, options())
    for mode in ("train", "eval", "eval", "train", "eval", "train"):
        getattr(model, mode)()
        getattr(eager, mode)()
        getattr(inference, mode)()
        assert torch.equal(training(X, Y)[1], eager_step(eager, theirs))
        assert torch.equal(inference(X), copy.deepcopy(eager)(X).detach())
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_each_mode_is_compiled_once() -> None:
    model = Net()
    model.norm = nn.Identity()  # whose statistics would stay on the device
    wrapper = poptorch.inferenceModel(model, options())
    compilations: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(1))
    try:
        for _ in range(3):
            model.eval()
            wrapper(X)
            model.train()
            wrapper.train()
            wrapper(X)
            wrapper.eval()  # through the executor, too
            assert torch.equal(wrapper(X), copy.deepcopy(model).eval()(X).detach())
            model.train()
    finally:
        handle.remove()
    assert len(compilations) == 2


class Labelled(Net):
    """A forward that needs labels to train: the example of the user guide."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        out = self.drop(self.norm(self.linear(x)))
        return (out, nn.functional.mse_loss(out, y)) if self.training else out


@pytest.mark.parametrize("called_before", [False, True])
def test_an_inference_model_remains_in_eval_mode(called_before: bool) -> None:
    """Source: PopTorch user guide, "From PyTorch to PopTorch", training, saving and copies."""
    torch.manual_seed(0)
    model = Labelled()
    model.eval()
    inference = poptorch.inferenceModel(model, options())
    if called_before:
        inference(X)
    model.train()
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        training(X, Y)
        assert torch.equal(inference(X), copy.deepcopy(model).eval()(X).detach())
        assert all(module.training for module in model.modules())
    assert not inference.explain(X).fatal
    inference.train()
    with pytest.raises(AttributeError):
        inference(X)


def test_one_module_of_it() -> None:
    """Frozen statistics are the commonest reason."""
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    for frozen in (False, True, False):
        model.norm.train(not frozen)
        eager.norm.train(not frozen)
        assert torch.equal(training(X, Y)[1], eager_step(eager, theirs))
    assert torch.equal(model.norm.running_mean, eager.norm.running_mean)


class SetsItself(nn.Module):
    """A forward that sets a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.eval()
        return self.drop(x)


def test_a_forward_that_sets_a_mode_is_compiled_once() -> None:
    wrapper = poptorch.inferenceModel(SetsItself(), options())
    compilations: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(1))
    try:
        for _ in range(3):
            assert torch.equal(wrapper(X), X)
    finally:
        handle.remove()
    assert len(compilations) == 1


def test_detached_in_between() -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    settings = {"lr": 0.1, "betas": (0.5, 0.9)}
    theirs = torch.optim.Adam(eager.parameters(), **settings)
    optimizer = torch.optim.Adam(model.parameters(), **settings)
    training = poptorch.trainingModel(model, options(), optimizer)
    for mode in (True, False, True):
        model.train(mode)
        eager.train(mode)
        loss = training(X, Y)[1]
        torch.testing.assert_close(loss, eager_step(eager, theirs))
        training.detachFromDevice()
    torch.testing.assert_close(model.linear.weight, eager.linear.weight)


def test_other_arguments_are_refused_in_the_other_mode_too() -> None:
    wrapper = poptorch.inferenceModel(Net(), options())
    wrapper(X)
    wrapper.eval()
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        wrapper(X[:4])
    assert wrapper(X).shape == X.shape
