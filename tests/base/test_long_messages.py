"""Messages of more than 80 lines: the first lines are shown, and a file has all of them."""

import tempfile
from pathlib import Path

import pytest

import poptorch


def lines(word: str, count: int) -> str:
    """Return a text of this many numbered lines."""
    return "\n".join(f"{word} {i}" for i in range(count))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is that of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("temporary")
def test_a_long_message_is_cut_to_its_first_lines_and_keeps_where_and_fix() -> None:
    error = poptorch.Error(
        "Long", got=lines("line", 81), where="train.py:3", fix=("shorten it", "or that")
    )

    title, first, *more, where, fix, other, _ = error.message.splitlines()
    assert title == "Long"
    assert first.split() == ["Got:", "line", "0"]
    assert [line.strip() for line in more] == [*(f"line {i}" for i in range(1, 8)), "..."]
    assert where.strip() == "Where:  train.py:3"
    assert fix.strip() == "Fix:    shorten it"
    assert other.strip() == "Fix:    or that"


def test_a_long_message_names_the_file_that_has_all_of_it(temporary: Path) -> None:
    error = poptorch.Error("Long", got=lines("text", 81), where="train.py:3")

    (log,) = temporary.iterdir()
    assert error.message.splitlines()[-1] == f"See {log} for details"
    assert "text 80" in log.read_text()


def test_a_message_of_80_lines_is_shown_whole(temporary: Path) -> None:
    error = poptorch.Error("short", got=lines("word", 79))

    assert "word 78" in str(error)
    assert list(temporary.iterdir()) == []


def test_a_long_message_is_written_once_and_for_this_user_alone(temporary: Path) -> None:
    for _ in range(3):
        poptorch.Error("Long", got=lines("number", 99), where="train.py:3")

    (log,) = temporary.iterdir()
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_long_message_overwrites_nothing_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, work = tmp_path / "mine", tmp_path / "work"
    mine.write_text("mine")
    work.mkdir()
    (work / "poptorch_error.log").symlink_to(mine)
    monkeypatch.chdir(work)

    poptorch.Error("Long", got=lines("row", 99), where="train.py:3")

    assert mine.read_text() == "mine"
    assert [path.name for path in work.iterdir()] == ["poptorch_error.log"]


def test_a_long_message_stays_whole_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    error = poptorch.Error("Long", got=lines("place", 99), where="train.py:3")

    assert "place 50" in error.message
