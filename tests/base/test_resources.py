"""What the machine has available, as files of the system describe it, and rare collections."""

import gc
import os
from pathlib import Path

import pytest

from poptorch._base import resources
from poptorch._base.resources import is_crowded


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of a system of four cores, where this process has two threads:
    one is running, and one sleeps.
    """
    for number, state in ((1, "R"), (2, "S")):
        thread = tmp_path / "task" / str(number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"{number} (a name) R) {state} 1 1")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(resources, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(resources, "_THREADS", tmp_path / "task")
    return tmp_path


@pytest.mark.parametrize("others", [3, 4, 30])
def test_a_machine_is_crowded_if_others_leave_one_core_at_most(others: int, system: Path) -> None:
    (system / "loadavg").write_text(f"0.50 0.40 0.30 {others + 1}/200 1234\n")

    assert is_crowded()


@pytest.mark.parametrize("others", [0, 2])
def test_a_machine_is_not_crowded_if_others_leave_two_cores(others: int, system: Path) -> None:
    (system / "loadavg").write_text(f"9.00 9.00 9.00 {others + 1}/200 1234\n")

    assert not is_crowded()


def test_a_system_without_such_files_is_not_crowded(system: Path) -> None:
    assert not is_crowded()


def test_a_machine_with_one_core_is_not_crowded(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "loadavg").write_text("2.00 2.00 2.00 3/200 1234\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)

    assert not is_crowded()


def test_garbage_is_collected_rarely_within_a_block() -> None:
    with resources.collecting_rarely():
        assert gc.get_threshold()[0] == resources.COLLECTING


def test_garbage_is_collected_as_before_after_a_block_that_fails() -> None:
    before = gc.get_threshold()

    with pytest.raises(LookupError), resources.collecting_rarely():
        raise LookupError

    assert gc.get_threshold() == before
