"""``make`` and a virtual environment that is there already, as after the README's commands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.source_tree import ROOT

TESTED = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
# Says which torch it has, as `python -c` would, and notes what else is asked of it.
PYTHON = """#!/bin/sh
case "$1" in -c) {says};; *) echo "$@" >>{log};; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def made(folder: Path, has: str | None) -> tuple[str, str]:
    """Make an environment that has a torch, or none; return what is printed, and the pinned one."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    says = f"echo {has}" if has else "exit 1"
    python.write_text(PYTHON.format(says=says, log=folder / "log"))
    python.chmod(0o755)
    (folder / ".installed").unlink(missing_ok=True)
    command = ["make", f"VENV={folder}", f"PYTHON={sys.executable}", f"{folder}/.installed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pins = (folder / "constraints.txt").read_text()
    return done.stdout, re.search(r"^torch==(.*)$", pins, re.M)[1]


@pytest.mark.slow
def test_make_keeps_an_installed_torch_of_another_version_and_says_so(tmp_path: Path) -> None:
    output, pinned = made(tmp_path, "2.99.1+cpu")

    assert pinned == "2.99.1+cpu"
    assert "Keeping torch==2.99.1+cpu" in output
    assert "make VENV=build/venv" in output


@pytest.mark.slow
@pytest.mark.parametrize("has", [None, TESTED, f"{TESTED}+cpu"])
def test_make_installs_the_tested_torch_where_there_is_none_or_that(
    has: str | None, tmp_path: Path
) -> None:
    output, pinned = made(tmp_path, has)

    assert pinned == TESTED
    assert "Keeping" not in output


@pytest.mark.slow
def test_make_replaces_a_torch_that_it_has_installed_itself(tmp_path: Path) -> None:
    made(tmp_path, None)

    output, pinned = made(tmp_path, "2.99.1")  # the tested one, before constraints.txt changed

    assert pinned == TESTED
    assert "Keeping" not in output
