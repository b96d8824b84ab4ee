"""The README's commands, followed: from a clone to a trained model, a plot and a checkpoint."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.source_tree import ROOT

pytestmark = pytest.mark.long
COMMANDS = (ROOT / "README.md").read_text().split("```sh\n")[1].split("```")[0].splitlines()


def run(command: str, folder: Path) -> str:
    settings = {"POPTORCH_BACKEND": "reference", "PYTHONPATH": ""}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env={**os.environ, **settings},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_five_commands_give_a_trained_model_a_plot_and_a_checkpoint(tmp_path: Path) -> None:
    clone, change, make, install, train = COMMANDS
    assert clone == f"git clone ADDRESS {change.removeprefix('cd ')}"
    folder = tmp_path / "clone"  # of what is here, committed or not
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=leave)
    run(make.replace("python3", sys.executable) + " --without-pip", folder)
    # No network: what the tests' own environment has is there already, and pip is its own.
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    theirs = [path for path in sys.path if path.endswith("-packages")]
    (packages / "tests.pth").write_text("\n".join(theirs))
    pip = f"{sys.executable} -m pip --python .venv/bin/python"
    offline = " --no-index --no-deps --no-build-isolation --ignore-installed"
    run(install.replace(".venv/bin/pip", pip) + offline, folder)
    told = run(train, folder)
    assert "losses of the first 20 updates" in told
    assert (folder / "speed.png").read_bytes().startswith(b"\x89PNG")
    saved = torch.load(folder / "model.pt")
    assert saved["head.weight"].shape == (1, 32)
    assert not torch.equal(saved["head.bias"], torch.zeros(1))
