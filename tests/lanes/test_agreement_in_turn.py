"""Micro-batches side by side are compared with the same ones in turn; a planted rule is wrong."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.wrapping import options
from poptorch import _lanes
from poptorch._ir.graph import Graph
from poptorch._ir.micro_batches import Lanes

aten = torch.ops.aten
side_by_side = _lanes.side_by_side


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.sin(self.layer(x)), x)


@pytest.fixture(autouse=True)
def _lanes_compute_cosines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(micro: Graph, lanes: Lanes) -> Graph:
        graph = side_by_side(micro, lanes)
        for node in graph.module.graph.nodes:
            if node.target is aten.sin.default:
                node.target = aten.cos.default
        graph.module.recompile()
        return graph

    monkeypatch.setattr(_lanes, "side_by_side", wrong)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def train(model: nn.Module, mode: str, x: torch.Tensor) -> None:
    opts = options(accumulation=3).lanes(3).checkAgainstEager(mode)
    wrapped = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(x)
    wrapped.copyWeightsToHost()


def test_lanes_with_other_results_are_an_error_if_the_options_say_so() -> None:
    with pytest.raises(poptorch.Error, match="different results when they run side by side"):
        train(Sines(), "error", torch.randn(6, 3))


def test_lanes_with_other_results_are_replaced_by_runs_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPTORCH_CHECK_AGAINST_EAGER", "warn")
    model, x = Sines(), torch.randn(6, 3)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for part in x.chunk(3):
        (eager(part) / 3).backward()
    optimizer.step()

    train(model, "warn", x)

    torch.testing.assert_close(model.state_dict(), eager.state_dict())
