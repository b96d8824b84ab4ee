"""The list of passes is what runs, in that order."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import poptorch
from poptorch._cli.main import main
from poptorch._compile import passes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return poptorch.identity_loss(x, "mean")


def compiled() -> None:
    opts = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    opts.Training.gradientAccumulation(2)
    model = Net()
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(torch.randn(4, 2))


def test_each_is_logged_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.setLogLevel("TRACE")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            compiled()
    finally:
        poptorch.setLogLevel("WARN")
    logged = [m.removeprefix("Pass ").split(":")[0] for m in caplog.messages if m[:5] == "Pass "]
    assert logged == [each.name for each in passes.PASSES]
    graphs = [m for m in caplog.messages if m.startswith("graph ")]
    assert graphs
    assert all("\n  in  param." in graph for graph in graphs)


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["pass", "room", "changes", "what", "it", "does"]
    for number, (line, each) in enumerate(zip(lines[1:], passes.PASSES, strict=True), 1):
        assert line.startswith(f"{number}")
        assert f"  {each.name}" in line
        assert each.does in line
