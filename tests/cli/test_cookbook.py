"""The cookbook's script for several processes, started as it says, trains as a plain loop does."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

from helpers import jobs
from helpers.source_tree import ROOT

pytestmark = pytest.mark.long
ENTRY = (ROOT / "docs" / "cookbook.md").read_text().split("## Train in several processes")[1]
COMMAND = ENTRY.split("`poprun ")[1].split("`")[0]
PROGRAM = ENTRY.split("```python\n")[1].split("```")[0]


def test_two_processes_train_as_one_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    words = [sys.executable if word == "python" else word for word in shlex.split(COMMAND)]
    assert words[:4] == ["--num-instances", "2", "--num-replicas", "2"]
    settings = jobs.environment(POPTORCH_BACKEND="reference")
    process = jobs.fork("helpers.jobs", words, tmp_path / "out", settings)
    try:
        assert jobs.status(process) == 0, (tmp_path / "out").read_text()
    finally:
        jobs.end([process])

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halves = torch.arange(64).view(2, 4, 8)  # of two processes, each in batches of 8
    for batch in range(4 * 20):
        rows = halves[:, batch % 4].flatten()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for name, value in torch.load("model.pt").items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)
