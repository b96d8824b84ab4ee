"""What would go wrong in silence is told once, in the moment, and what is right is not."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poptorch
from helpers.wrapped import Graded, normal, options

X, Y = normal(16, 4), torch.arange(16) % 3


def wrapped(dropout: float = 0.0, mode=poptorch.OutputMode.Final, **counts: int):
    layers = {"layer": nn.Linear(4, 3), "dropout": nn.Dropout(dropout)}
    model = Graded(nn.functional.cross_entropy, both=True, **layers)
    opts = options(**counts).outputMode(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, poptorch.trainingModel(model, opts, optimizer), optimizer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("compiles", [False, True])
def test_stepping_by_hand(compiles: bool, caplog, monkeypatch) -> None:
    if compiles:  # as torch.compile leaves it
        usual = torch.optim.SGD._init_group
        monkeypatch.setattr(torch.optim.SGD, "_init_group", torch.compiler.disable(usual))
    _, training, optimizer = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        training(X, Y)
        optimizer.step()
    (said,) = lines(caplog)
    assert "optimizer.step() does nothing" in said


def in_a_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            return parameter.grad
    return None


def held() -> Callable[[nn.Module], None]:
    kept: list[torch.Tensor] = []
    return lambda model: kept[0].grad if kept else kept.append(model.layer.weight)


@pytest.mark.parametrize("read, wanted", [
    (lambda model: model.layer.weight.grad, None), (in_a_loop, None), (held(), None),
    (lambda model: [parameter.grad for parameter in model.parameters()], [None, None]),
])  # fmt: skip
def test_reading_gradients(read, wanted: object, caplog) -> None:
    model, training, _ = wrapped()
    read(model)
    for _ in range(3):
        training(X, Y)
        assert read(model) == wanted
    (said,) = lines(caplog)
    assert "have no .grad" in said
    for parameter in model.parameters():
        assert parameter.requires_grad


def test_reading_weights_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    model, training, optimizer = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        training(X, Y)
        for parameter in model.parameters():
            assert parameter.isfinite().all()
        torch.autograd.grad(model.layer.weight.sum(), model.layer.weight)
    training(X, Y)
    assert model.layer.weight.is_leaf, "what .grad needs"
    assert lines(caplog) == []


def test_batches_that_are_cut_unless_they_are_meant_to_be(caplog: pytest.LogCaptureFixture) -> None:
    _, training, _ = wrapped(iterations=2, accumulation=2)
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
        training(x, y)
    (said,) = lines(caplog)
    assert "batch_size=8, is taken as 4 micro-batches of 2" in said
    _, training, _ = wrapped(accumulation=2)
    training(X, Y)
    _, training, _ = wrapped(accumulation=2)
    opts = options()
    opts.Training.gradientAccumulation(2)
    for x, y in poptorch.DataLoader(opts, TensorDataset(X, Y), batch_size=4):
        training(x, y)
    _, training, _ = wrapped()
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
        training(x, y)
    assert lines(caplog) == []


@pytest.mark.parametrize("mode, at", [(poptorch.OutputMode.All, 3), (poptorch.OutputMode.Final, 4)])
def test_the_first_loss_that_is_no_number(mode: poptorch.OutputMode, at: int, caplog) -> None:
    """Of the results of all updates the one is named; of the last of a call, that one."""
    _, training, _ = wrapped(iterations=2, accumulation=2, mode=mode)
    training(X, Y)
    assert lines(caplog) == []
    bad = X.clone()
    bad[0] = torch.inf
    assert not training(bad, Y)[1].isfinite().all()
    (said,) = lines(caplog)
    assert f"The loss is nan for the first time, in update {at} of this run" in said
    training(bad, Y)
    assert lines(caplog) == []


@pytest.mark.parametrize("dropout, count", [(0.5, 1), (0.0, 0)])
def test_seeding_the_host_once_the_program_draws(dropout, count, caplog, monkeypatch) -> None:
    monkeypatch.setattr("poptorch._session.guards.CHECK_EVERY", 0.0)
    torch.manual_seed(1)
    _, training, _ = wrapped(dropout)
    for _ in range(2):
        training(X, Y)
    assert lines(caplog) == []
    for _ in range(2):
        torch.manual_seed(2)
        training(X, Y)
    said = lines(caplog)
    assert len(said) == count
    assert all("torch.manual_seed(2): assign executor.rng_state" in line for line in said)


def test_a_program_that_goes(caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(nn.Linear(4, 2), options().programs(2))
    for size in (1, 2, 1, 2):
        model(normal(size, 4))
    assert lines(caplog) == []
    for size in (3, 1, 2):
        model(normal(size, 4))
    (said,) = lines(caplog)
    assert "Options.programs(2) is full" in said
    assert "input float32[1, 4]" in said
    assert "options.programs(3)" in said
