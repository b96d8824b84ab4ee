"""Names of shared memory that ended processes left are removed, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poptorch._data import worker


def test_only_what_the_ended_processes_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path)
    if (ended := os.fork()) == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    gone, other, alive = f"torch_{ended}_1_2", "torch_12_3", f"torch_{os.getpid()}_5_6"
    for name in (gone, other, alive, f"mine_{ended}_1", "torch"):
        (tmp_path / name).touch()
    assert worker.remove_segments({ended, os.getpid()}) == {os.getpid()}
    assert not (tmp_path / gone).exists()
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path / "none")
    assert worker.remove_segments({ended}) == set()
