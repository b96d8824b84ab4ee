"""What surrounds a process: variables, its log, memory, time, and files that lie."""

import itertools
import json
import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from poptorch._base import archive, env, log, resources, timing
from poptorch._base.errors import Error


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("0", False),
        (" Yes", True),
        ("off", False),
        ("2", True),
        ("", None),
    ],
)
def test_a_flag_of_the_environment_has_several_spellings(
    text: str, value: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_IPU_MODEL", text)
    assert env.get("POPTORCH_IPU_MODEL") is value


@pytest.mark.parametrize(
    ("name", "text"), [("POPTORCH_WAIT_FOR_IPU", "maybe"), ("OMPI_COMM_WORLD_SIZE", "two")]
)
def test_an_invalid_value_is_an_error_that_names_the_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} has an invalid value") as caught:
        env.get(name)
    assert isinstance(caught.value, Error)
    assert text in str(caught.value)


def test_a_misspelt_variable_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POPTORCH_BACKENDS", "reference")
    log.setup()
    lines = [record.getMessage() for record in caplog.records]
    assert any("POPTORCH_BACKENDS has no effect" in x and "POPTORCH_BACKEND?" in x for x in lines)


@pytest.fixture
def fresh_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``setup`` run as at import, and put back what was there."""
    level = log._level
    for logger in (log.python, log.engine):
        monkeypatch.setattr(logger, "handlers", [])
    yield
    for handler in log.engine.handlers:
        handler.close()
    log.set_level(level)


@pytest.mark.usefixtures("fresh_handlers")
def test_the_engines_log_goes_to_the_file_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(tmp_path / "engine.log"))
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "INFO")
    log.setup()
    log.engine.info("one line")
    log.python.info("another")
    assert "one line" in (tmp_path / "engine.log").read_text()
    assert "one line" not in capsys.readouterr().err
    assert log.engine.level == logging.INFO


@pytest.mark.usefixtures("fresh_handlers")
def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(tmp_path / "missing" / "engine.log"))
    log.setup()
    log.engine.warning("one line")
    printed = capsys.readouterr().err
    for part in ("POPTORCH_LOG_DEST names cannot be written", "No such file", "one line"):
        assert part in printed


@pytest.mark.usefixtures("fresh_handlers")
def test_a_full_disk_is_one_warning_and_the_log_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPTORCH_LOG_DEST", "/dev/full")
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "INFO")
    log.setup()
    for number in range(3):
        log.engine.info("line %d", number)
    warned, *lines = capsys.readouterr().err.splitlines()
    assert "POPTORCH_LOG_DEST names cannot be written" in warned
    assert "/dev/full: No space left on device" in warned
    assert [line.rpartition("] ")[2] for line in lines] == ["line 0", "line 1", "line 2"]


def test_each_line_of_the_trace_names_its_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_level", "TRACE")
    monkeypatch.setattr(log.engine, "level", logging.DEBUG)
    monkeypatch.setattr(log.engine, "_cache", {})  # of what is enabled: none of this level stays
    log.trace("fine %s", "grained")
    log.engine.debug("coarse")
    printed = capsys.readouterr().err  # with what others have to say
    assert "[trace] fine grained" in printed
    assert "[debug] coarse" in printed


GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the control groups of a machine with 20 GiB available, 19 of them in the page
    cache.
    """
    memory = SimpleNamespace(total=24 * GIB, available=20 * GIB, free=GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resources, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(resources, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize("group", ["job/part", "job", ""])
def test_a_limit_of_a_group_counts_without_the_page_cache(groups: Path, group: str) -> None:
    (groups / "own").write_text("0::/job/part\n")
    (groups / "job" / "part").mkdir(parents=True)
    (groups / "job" / "memory.max").write_text("max\n")
    (groups / group / "memory.max").write_text(f"{8 * GIB}\n")
    (groups / group / "memory.current").write_text(f"{7 * GIB}\n")
    (groups / group / "memory.stat").write_text(f"anon 5\ninactive_file {6 * GIB}\n")
    assert resources.available_memory() == 7 * GIB
    assert resources.memory_size() == 24 * GIB


def test_groups_of_the_first_kind_are_read_too(groups: Path) -> None:
    (groups / "own").write_text("5:cpu:/other\n4:memory:/job\n1:name=systemd:/x\n")
    own = groups / "memory" / "job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (own / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    assert resources.available_memory() == 0  # over it, with nothing to give back


def test_the_time_of_an_inner_part_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = zip(itertools.count(0.0), itertools.repeat(0.0), strict=False)
    monkeypatch.setattr(timing, "_now", clock.__next__)
    with pytest.raises(ZeroDivisionError), timing.measured() as parts:
        with timing.part("outer"):
            for _ in range(2):
                with timing.part("inner"):
                    pass
        with timing.part("failing"):
            1 / 0  # noqa: B018
    rows = [line.split() for line in parts.text().splitlines()]
    assert {row[0]: row[-2] for row in rows if row[0] != "the"} == {
        "part": "wall",
        "outer": "3.00",
        "inner": "2.00",
        "failing": "1.00",
        "all": "9.00",
    }


def header(digests: object) -> str:
    return json.dumps({"format": archive.FORMAT, "poptorch": "0", "digests": digests})


def with_header(path: Path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(archive.HEADER, text)


def many_names(path: Path) -> None:
    """A list of parts that is longer than any file of ours, and all of them the same one."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(archive.HEADER, header({}))
        file.filelist += [file.filelist[0]] * (archive.LARGEST_LIST // 50)
        file._didModify = True


def larger_than_memory(path: Path) -> None:
    """It takes no room on the disk: a hole is in it."""
    archive.write(path, {})
    os.truncate(path, resources.memory_size() + 1)


INCONSISTENT_FILES = {
    "names without digests": (
        lambda path: with_header(path, header([archive.HEADER])),
        "no mapping|not a mapping",
    ),
    "many names": (many_names, "list of its parts is too long"),
    "a long header": (
        lambda path: with_header(path, header({}) + " " * archive.LARGEST_LIST),
        "header is too long",
    ),
    "a hole": (larger_than_memory, "larger than the memory of this machine"),
}


@pytest.mark.parametrize("fault", INCONSISTENT_FILES)
def test_a_file_with_wrong_sizes_of_its_parts_is_refused(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    make, why = INCONSISTENT_FILES[fault]
    make(path)
    with pytest.raises(archive.InvalidFile, match=why):
        archive.read(path)


@pytest.mark.parametrize("what", ["a pipe", "a device", "no text"])
def test_text_is_read_from_files_that_end(what: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"\xff")
    with pytest.raises(archive.InvalidFile):
        archive.read_text(path)
