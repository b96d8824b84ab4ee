"""Standard streams that are closed, full or not there fail no import and no call."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import poptorch
from helpers.wrapping import Regression, normal, options, training
from poptorch._base import terminal

SCRIPT = """
import os, pathlib, sys
import torch
import poptorch

class Model(torch.nn.Linear):
    def forward(self, x):
        out = poptorch.ipu_print_tensor(super().forward(x))
        out = out if x.sum() > 0 else -out  # which warns
        return out, poptorch.identity_loss(out.square(), "mean")

model = Model(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
executor = poptorch.trainingModel(model, poptorch.Options().backend("reference"), optimizer)
executor(torch.ones(4, 3))
poptorch.setLogLevel("DEBUG")
executor.destroy()
pathlib.Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.larger("test_the_progress_bar_and_the_log_fail_no_call")
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_script_trains_with_streams_that_are_closed_or_full(streams: str, tmp_path: Path) -> None:
    script, result = tmp_path / "train.py", tmp_path / "result"
    script.write_text(SCRIPT)

    subprocess.run(["sh", "-c", f"{sys.executable} {script} {result} {streams}"], check=True)

    assert result.read_text() == "done"


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), open("/dev/full", "w")])  # noqa: SIM115
def test_the_progress_bar_and_the_log_fail_no_call(
    stream: io.StringIO | io.TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = training(Regression(), options().showCompilationProgressBar(True))
    monkeypatch.setattr(sys, "stderr", stream)
    poptorch.setLogLevel("DEBUG")

    loss = executor(normal(2, 4), torch.zeros(2, 2))

    assert loss > 0


def test_a_stream_that_replaces_another_one_gets_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, later = terminal.Stream("stderr"), io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)

    stream.write("a line\n")

    assert later.getvalue() == "a line\n"


def test_a_missing_stream_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    assert not terminal.Stream("stderr").isatty()
