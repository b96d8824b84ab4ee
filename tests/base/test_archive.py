"""Zips that lie: refused by their lists of parts, before the parts are read."""

import json
import os
import zipfile

import pytest

from poptorch._base import archive, resources


def header(digests: object) -> str:
    return json.dumps({"format": archive.FORMAT, "poptorch": "0", "digests": digests})


def with_header(path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(archive.HEADER, text)


def many_names(path) -> None:
    """A list of parts that is longer than any file of ours, and all of them the same one."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(archive.HEADER, header({}))
        file.filelist += [file.filelist[0]] * (archive.LARGEST_LIST // 50)
        file._didModify = True


def larger_than_memory(path) -> None:
    """It takes no room on the disk: a hole is in it."""
    archive.write(path, {})
    os.truncate(path, resources.memory_size() + 1)


LIES = {
    "names without digests": (
        lambda path: with_header(path, header([archive.HEADER])),
        "no mapping|not a mapping",
    ),
    "many names": (many_names, "list of parts is too long"),
    "a long header": (
        lambda path: with_header(path, header({}) + " " * archive.LARGEST_LIST),
        "header is too long",
    ),
    "a hole": (larger_than_memory, "larger than this machine's memory"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_lies_about_its_parts_is_refused(lie: str, tmp_path) -> None:
    path = tmp_path / "file"
    make, why = LIES[lie]
    make(path)
    with pytest.raises(archive.InvalidFile, match=why):
        archive.read(path)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_of_unfinished_files_those_of_other_hosts_stay(elsewhere: bool, tmp_path, monkeypatch):
    """Nobody knows here whether a process there still writes."""
    path = tmp_path / "file"
    with monkeypatch.context() as dying, pytest.raises(OSError, match="killed"):
        dying.setattr(os, "getpid", lambda: 1 << 23)  # of no process here
        dying.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        dying.setattr(os, "unlink", lambda _: None)
        if elsewhere:
            dying.setattr(archive, "_host", lambda: "another")
        archive.write(path, {})
    (unfinished,) = tmp_path.iterdir()
    archive.write(path, {})
    assert unfinished.exists() == elsewhere


@pytest.mark.parametrize("what", ["a pipe", "a device", "no text"])
def test_text_is_read_from_files_that_end(what: str, tmp_path) -> None:
    path = tmp_path / "text"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"\xff")
    with pytest.raises(archive.InvalidFile):
        archive.read_text(path)
