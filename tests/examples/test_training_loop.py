"""The page's complete training loop: killed at any moment, it goes on with the same losses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from helpers import programs
from helpers.source_tree import ROOT

pytestmark = pytest.mark.slow
PROGRAM = (ROOT / "docs/howto/training_loop.md").read_text().split("```python\n")[1].split("```")[0]


def start(folder: Path) -> programs.Program:
    (folder / "train.py").write_text(PROGRAM)
    settings = programs.with_ours(POPTORCH_BACKEND="reference")
    return programs.Program("train.py", folder=folder, environment=settings)


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()

    process = start(killed)
    first = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.close()

    again = start(killed)
    rest = again.communicate()[0].splitlines()
    assert again.returncode == 0
    again.close()

    monkeypatch.chdir(whole)
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    exec(compile(PROGRAM, "train.py", "exec"), {"__name__": "__main__"})
    expected = capsys.readouterr().out.splitlines()
    epoch = int(rest[0].split()[1])
    assert 1 < epoch < 10  # how far it came before it was killed is chance
    assert [line.strip() for line in first] == expected[:3]
    assert rest == expected[epoch:]
    assert 5 < len(expected) < 30  # it stopped early, and not at once
    validation = [float(line.split()[-1]) for line in expected]
    best = torch.load(whole / "best.pt")
    assert min(validation) < 0.6 * validation[0]
    assert best.keys() == {f"layers.{n}.{k}" for n in (0, 3) for k in ("weight", "bias")}
    for name, value in torch.load(killed / "best.pt").items():
        assert torch.equal(value, best[name])
