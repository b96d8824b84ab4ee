"""Files are written whole, with the user's permissions, and where no link of others leads."""

import contextlib
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import programs
from poptorch._base import safe_files

OTHER = 65534  # the number of a user without rights
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")


def write(path: Path, content: bytes) -> None:
    with safe_files.replacing(path) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with safe_files.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), safe_files.replacing(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("mask, expected", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(
    mask: int, expected: int, tmp_path: Path
) -> None:
    with umask(mask):
        write(tmp_path / "file", b"1")
    assert mode(tmp_path / "file") == expected


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_passes_its_permissions_on(
    permissions: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(permissions)
    with umask(0o022), safe_files.replacing(path):
        (unfinished,) = tmp_path.glob(".file*")
        assert mode(unfinished) == permissions
    assert mode(path) == permissions


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    mine, path = tmp_path / "mine", tmp_path / "file"
    mine.write_bytes(b"mine")
    path.symlink_to(mine)
    write(path, b"new")
    assert mine.read_bytes() == b"mine"
    assert not path.is_symlink()


def test_a_link_that_waits_under_the_name_of_the_unfinished_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_files.secrets, "token_hex", lambda count: "guessed")
    path, victim = tmp_path / "file", tmp_path / "victim"
    victim.write_text("of the user")
    waiting = f"{safe_files._prefix(path)}{os.getpid()}-guessed"
    (tmp_path / waiting).symlink_to(victim)

    with pytest.raises(FileExistsError):
        safe_files.write_text(path, "new")

    assert victim.read_text() == "of the user"


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            write(path, b"new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_text_for_the_user_goes_where_the_users_own_link_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("report.html")

    safe_files.write_text_for_user(tmp_path / "link", "text")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "report.html").read_text() == "text"


@needs_root
def test_a_text_for_the_user_does_not_go_through_a_link_of_another_user(tmp_path: Path) -> None:
    common, victim = tmp_path / "common", tmp_path / "victim"
    victim.write_text("of the user")
    common.mkdir()
    common.chmod(0o1777)
    (common / "report.html").symlink_to(victim)
    os.lchown(common / "report.html", OTHER, OTHER)

    with pytest.raises(PermissionError, match="a link that belongs to another user"):
        safe_files.write_text_for_user(common / "report.html", "text")

    assert victim.read_text() == "of the user"


def test_a_text_for_the_user_can_be_written_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    safe_files.write_text_for_user(tmp_path / "pipe", "text")

    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_a_text_for_the_user_can_be_written_to_standard_output() -> None:
    code = (
        "from pathlib import Path; from poptorch._base import safe_files;"
        "safe_files.write_text_for_user(Path('/dev/stdout'), 'text')"
    )

    done = programs.run("-c", code)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "text"


def test_links_of_the_user_are_followed_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "first").symlink_to("folder/second")
    (tmp_path / "folder" / "second").symlink_to("end")
    assert safe_files.followed(tmp_path / "first") == tmp_path / "folder" / "end"


def test_links_without_an_end_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links") as caught:
        safe_files.followed(tmp_path / "circle")
    assert caught.value.errno == errno.ELOOP


@needs_root
@pytest.mark.parametrize("permissions", [0o1777, 0o777])
def test_a_link_of_another_user_is_refused_where_everybody_can_write(
    permissions: int, tmp_path: Path
) -> None:
    link = tmp_path / "common" / "model"
    link.parent.mkdir()
    link.parent.chmod(permissions)
    link.symlink_to(tmp_path / "mine")
    os.lchown(link, OTHER, OTHER)
    with pytest.raises(PermissionError, match="a link that belongs to another user"):
        safe_files.followed(link)


@needs_root
def test_a_link_of_another_user_is_followed_where_only_the_user_can_write(tmp_path: Path) -> None:
    link = tmp_path / "model"
    link.symlink_to("other")
    os.lchown(link, OTHER, OTHER)
    assert safe_files.followed(link) == tmp_path / "other"


def killed_while_writing(path: Path) -> str:
    """Return the name of what a killed process has left."""
    if not (child := os.fork()):
        with safe_files.replacing(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = path.parent.glob(f".{path.name}.*")
    return left.name


def test_the_next_write_removes_the_files_of_a_killed_writer(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "file")
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]


def test_leftovers_of_another_file_stay(tmp_path: Path) -> None:
    left = killed_while_writing(tmp_path / "other")
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == [left, "file"]


def test_leftovers_of_another_host_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks may not work across hosts, so the process on that host may still be writing."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(safe_files, "_host", lambda: "another")
        left = killed_while_writing(tmp_path / "file")
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == [left, "file"]


def test_an_unfinished_file_stays_while_its_writer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another container, the id of this process does not exist or belongs to another process."""
    path = tmp_path / "file"
    with monkeypatch.context() as container:
        container.setattr(os, "getpid", lambda: 1 << 23)
        writing = safe_files.replacing(path)
        file = writing.__enter__()
    write(path, b"first")
    file.write(b"second")
    writing.__exit__(None, None, None)
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["file"]


def test_a_new_file_that_was_taken_for_one_that_was_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finds the file after it was made and before it was marked."""
    lock, removed = fcntl.flock, []

    def remove_first(handle: int, how: int) -> None:
        lock(handle, how)
        if not removed:
            (unfinished,) = tmp_path.iterdir()
            unfinished.unlink()
            removed.append(unfinished)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    write(tmp_path / "file", b"new")
    assert len(removed) == 1
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_system_without_locks_is_sufficient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    left = killed_while_writing(tmp_path / "file")
    monkeypatch.setattr(fcntl, "flock", none)
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == [left, "file"]


NAMES = {
    "training": "training",
    "org/model": "org_model",
    "../../x": ".._.._x",
    "..": "__",
    ".": "_",
    "": "_",
    "/etc/passwd": "_etc_passwd",
    "a\0b": "a_b",
    "\x1b[31m": "_[31m",
    "\ud800": "_",
    "ä" * 150: "ä" * 100,
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_from_a_text_cannot_leave_its_folder(text: str) -> None:
    assert safe_files.name_from(text) == NAMES[text]
