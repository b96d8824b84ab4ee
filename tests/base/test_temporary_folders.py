"""Folders in the temporary directory end with their process, also if that is killed."""

import fcntl
import os
import signal
import tempfile
from pathlib import Path

import pytest

from poptorch._base import temporary_folders

PREFIX = "poptorch-test-"


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def killed() -> None:
    """Let a process make a folder with a file in it, and be killed."""
    if not (child := os.fork()):
        folder = temporary_folders.folder(PREFIX)
        (folder / "file").write_text("content")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_next_folder_removes_those_of_a_killed_process(tmp_path: Path) -> None:
    killed()
    (left,) = tmp_path.iterdir()
    with temporary_folders.folder_within_block(PREFIX) as folder:
        assert [*tmp_path.iterdir()] == [folder]
    assert folder != left
    assert [*tmp_path.iterdir()] == []


def test_a_folder_stays_while_its_process_runs(tmp_path: Path) -> None:
    with temporary_folders.folder_within_block(PREFIX) as first:
        with temporary_folders.folder_within_block(PREFIX):
            assert first.is_dir()
        assert first.is_dir()


def test_a_folder_is_for_the_user_alone() -> None:
    with temporary_folders.folder_within_block(PREFIX) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_other_kinds_and_links_stay(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "in-use").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(mine)
    (tmp_path / f"{PREFIX}kept").mkdir()
    with temporary_folders.folder_within_block(PREFIX):
        pass
    assert (mine / "in-use").exists()
    assert (tmp_path / f"{PREFIX}kept").is_dir()


def test_a_fork_that_ends_leaves_its_parents_folder() -> None:
    with temporary_folders.folder_within_block(PREFIX) as folder:
        if not (child := os.fork()):
            temporary_folders._remove(folder, os.open(os.devnull, os.O_RDONLY), os.getppid())
            os._exit(0)
        os.waitpid(child, 0)
        assert folder.is_dir()


def test_a_folder_that_another_process_takes_for_one_that_was_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, []

    def take_the_first(handle: int, how: int) -> None:
        if not taken:
            taken.append(handle)
            raise BlockingIOError
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", take_the_first)
    with temporary_folders.folder_within_block(PREFIX) as folder:
        assert folder.is_dir()
    assert len(taken) == 1
