"""How often the rooms work in one compilation, and what a plan that is asked for adds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import poptorch
from poptorch import _capture, _place


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).tanh()
        poptorch.Block.start("B", 1)
        return poptorch.identity_loss(self.second(x).tanh(), "mean")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count captures and placements."""
    calls: Counter[str] = Counter()
    for room, name in ((_capture, "capture"), (_place, "place")):
        function = getattr(room, name)

        def counted(*args, function=function, name=name):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(room, name, counted)
    return calls


@pytest.mark.parametrize("backend, lanes", [("staged", 1), ("reference", 1), ("reference", 3)])
def test_a_compilation_places_once(backend: str, lanes: int, counts: Counter[str]) -> None:
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False).lanes(lanes)
    opts.Training.gradientAccumulation(3)
    model = Two()
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(torch.randn(6, 4))
    assert counts == {"capture": 1, "place": 1}
    plan = training.plan()
    again = lanes > 1  # stages are cut from the graph of a single micro-batch
    assert counts == {"capture": 1 + again, "place": 1 + again}
    assert training.plan() is plan
    assert list(plan.staged.graphs) == sorted(plan.staged.graphs)
    assert plan.layout.stages == plan.staged.workload.stages
