"""Names of shared memory that ended processes left are removed, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poptorch._data import worker
from poptorch._data.process import members

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_only_what_the_ended_processes_left_is_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, other, alive = f"torch_{ended.pid}_1_2", "torch_12_3", f"torch_{os.getpid()}_5_6"
    for name in (gone, other, alive, f"mine_{ended.pid}_1", "torch"):
        (folder / name).touch()
    assert worker.remove_segments({ended.pid, os.getpid()}) == {os.getpid()}
    assert not (folder / gone).exists()
    assert len(list(folder.iterdir())) == 4


def test_no_folder_no_segments(folder: Path) -> None:
    folder.rmdir()
    assert worker.remove_segments({2**22 + 1}) == set()


def test_members_of_a_group() -> None:
    code = "import os; os.setpgid(0, 0); print(); input()"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        leader.stdout.readline()
        assert members(leader.pid) == {leader.pid}
    finally:
        leader.communicate(b"\n")
    assert members(leader.pid) == set()
