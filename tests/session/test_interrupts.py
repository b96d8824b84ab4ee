"""Ctrl-C: never in the middle of an update, and never at the price of the weights."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import poptorch


class Interrupting(nn.Module):
    """Presses Ctrl-C while it is being captured, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.presses = [True]

    def forward(self, x, y):
        if self.presses and poptorch.isRunningOnIpu():
            self.presses.pop()
            os.kill(os.getpid(), signal.SIGINT)
        return nn.functional.mse_loss(self.layer(x), y)


def wrapped(model: nn.Module, **counts: int) -> poptorch.PoplarExecutor:
    opts = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    opts.deviceIterations(counts.get("iterations", 1))
    opts.Training.gradientAccumulation(counts.get("accumulation", 1))
    opts.lanes(1)
    return poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))


def test_while_compiling() -> None:
    model = Interrupting()
    before = model.layer.weight.clone()
    training = wrapped(model)
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    with pytest.raises(KeyboardInterrupt):
        training(x, y)
    assert not training.isCompiled()
    assert torch.equal(model.layer.weight, before)
    assert torch.isfinite(training(x, y))


def test_while_running(monkeypatch) -> None:
    """It arrives between two micro-batches; half an update leaves no trace."""
    from poptorch.backends import driver

    model = Interrupting()
    model.presses.clear()
    training = wrapped(model, iterations=3, accumulation=4)
    x, y = torch.randn(48, 4), torch.randn(48, 2)
    training.compile(x, y)
    calls = []
    original = driver._BoundRun.__call__

    def press_on_the_seventh(self, *where):
        calls.append(where)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *where)

    monkeypatch.setattr(driver._BoundRun, "__call__", press_on_the_seventh)
    with pytest.raises(KeyboardInterrupt):
        training(x, y)
    assert len(calls) == 7  # the one in progress was finished, no other begun
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()

    after_one_update = nn.Linear(4, 2)
    after_one_update.load_state_dict(model.layer.state_dict())
    twin = Interrupting()
    twin.presses.clear()
    twin.layer.load_state_dict(after_one_update.state_dict())
    again = wrapped(twin, iterations=3, accumulation=4)
    again(x, y)
    training(x, y)
    assert torch.equal(model.layer.weight, twin.layer.weight)
