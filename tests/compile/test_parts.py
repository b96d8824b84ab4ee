"""A graph that is compiled runs while others are still interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options
from poptorch._compile import helper, tiers
from poptorch._ir.slots import Kind

X, Y = normal(12, 4), normal(12, 2, seed=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


def training(backend: str) -> poptorch.PoplarExecutor:
    """Three micro-batches one after another, then an update: two graphs."""
    torch.manual_seed(0)
    net = Net()
    settings = options(accumulation=3).backend(backend).lanes(1)
    return poptorch.trainingModel(net, settings, torch.optim.SGD(net.parameters(), lr=0.1))


class Compiling:
    """A job whose graphs are ready when the test says so."""

    def __init__(self, graphs: object, *_: object) -> None:
        self.keys = list(graphs)
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.news = False

    @property
    def finished(self) -> bool:
        return len(self.outcomes) == len(self.keys)

    def is_ready(self, key: str) -> None:
        self.outcomes[key], self.news = (helper.STORED, ""), True

    def look(self) -> bool:
        news, self.news = self.news, False
        return news

    def end(self) -> None:
        pass


@pytest.fixture
def ready(monkeypatch) -> dict[str, list[int]]:
    """Which graphs are compiled, with a number for each of their runs: they are interpreted."""
    runs: dict[str, list[int]] = {}
    graphs = {}

    def find(self: object, key: str, builder: object) -> object:
        if key not in runs:
            return None
        function = tiers.Reference().interpreted(graphs[key])
        return lambda tensors: runs[key].append(0) or function(tensors)

    def missing(self: tiers.PlanCode) -> dict[str, object]:
        graphs.update((key, self.graphs[name]) for name, key in self.keys.items())
        return {key: graph for key, graph in graphs.items() if key not in runs}

    monkeypatch.setattr(tiers.PlanCode, "missing", missing)
    monkeypatch.setattr("poptorch._compile.cache.Store.find", find)
    monkeypatch.setattr(tiers, "CompileJob", Compiling)
    monkeypatch.setattr(tiers, "SHARE", 0.0)
    return runs


def test_taking_over_in_parts(ready) -> None:
    model, reference = training("auto"), training("reference")
    losses = [model(X, Y) for _ in range(2)]
    job = model._executable._job
    micro, update = job.keys  # what runs three times a call comes first
    graphs = {key: name for name, key in model._executable._code.keys.items()}
    inputs = model.plan().program.graphs[graphs[micro]].inputs
    assert any(slot.kind is Kind.BATCH for slot in inputs)
    ready[micro] = []
    job.is_ready(micro)
    losses += [model(X, Y) for _ in range(2)]
    assert len(ready[micro]) == 2 * 3
    assert str(model.plan()).startswith(
        f"runs on the reference backend, {graphs[micro]} on inductor, "
        "until inductor has compiled it"
    )
    ready[update] = []
    job.is_ready(update)
    losses += [model(X, Y) for _ in range(2)]
    assert (len(ready[micro]), len(ready[update])) == (4 * 3, 2)
    assert str(model.plan()).startswith("runs on the inductor backend\n")
    torch.testing.assert_close(losses, [reference(X, Y) for _ in range(6)], rtol=0, atol=0)
