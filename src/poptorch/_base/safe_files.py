"""Write files completely or not at all, and never through a link that another user has created.

``replacing`` writes under a temporary name and then renames, so a reader sees the old file or the
new one. A lock marks the temporary file as long as its writer lives, in any container. Files of a
killed writer are removed by the next writer of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LEFT = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PERMISSIONS = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40  # the kernel follows this number of links
_LONGEST_NAME = 200  # bytes; most file systems allow 255
_NO_NAME = re.compile(r"[/\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def name_from(text: str) -> str:
    """Return a name for a file or folder that is made from a text, and cannot lead out of its
    folder.

    Path separators, and characters that terminals should not receive, become ``_``.
    """
    name = _NO_NAME.sub("_", text)
    if not name.strip("."):
        name = "_" * len(name) or "_"
    return name.encode()[:_LONGEST_NAME].decode(errors="ignore")


def followed(path: Path) -> Path:
    """Return the path at the end of the links that lead to a file which the user names.

    Raises:
        PermissionError: another user has put a link in a folder that everybody can write to.
    """
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return path
        _check_link(path)
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _check_link(link: Path) -> None:
    """Refuse links that the kernel refuses to follow in such folders."""
    folder, owner = link.parent.stat(), link.lstat().st_uid
    if folder.st_mode & stat.S_IWOTH and owner not in (os.geteuid(), folder.st_uid):
        why = "it is a link that belongs to another user, in a folder that everybody can write to"
        raise PermissionError(errno.EACCES, why, str(link))


def write_text(path: Path, text: str) -> None:
    """Write a text file; see ``replacing``."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_text_for_user(path: Path, text: str) -> None:
    """Write a text to a file that the user named. The user's own links are followed to their end.

    A regular file is replaced when the whole text is written; see ``replacing``. Pipes, and names
    in ``/dev`` such as ``/dev/stdout``, are written to directly.

    Raises:
        PermissionError: another user has put a link there; see ``followed``.
    """
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    else:
        write_text(followed(path), text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a new file, which replaces the one with this name when it is complete.

    A link with this name is replaced. New files get the permissions that the umask allows. A file
    that replaces another one gets the permissions of that file.

    Raises:
        OSError: it cannot be written, or a device or a pipe has this name.
    """
    _remove_left(path)
    file, temporary = _unfinished(path)
    try:
        with file:
            yield file
            file.flush()
            os.replace(temporary, path)  # it is still marked, so no other process removes it
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _unfinished(path: Path) -> tuple[BinaryIO, Path]:
    """Return a new file that is marked as being written, and its name."""
    known = _permissions(path)
    while True:
        temporary = path.with_name(f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}")
        handle = os.open(temporary, NEW, 0o666 if known is None else known)
        file = os.fdopen(handle, "w+b")
        if is_marked(handle):
            break
        file.close()
    if known is not None:
        with contextlib.suppress(PermissionError):  # file systems without permissions
            os.fchmod(handle, known)
    return file, temporary


def _permissions(path: Path) -> int | None:
    """Return the permissions of a file of this user that will be replaced."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):  # root would replace /dev/null
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    own = kind == stat.S_IFREG and status.st_uid == os.geteuid()
    return status.st_mode & _PERMISSIONS if own else None


def _prefix(path: Path) -> str:
    return f".{path.name}.{_host()}-"


@functools.cache
def _host() -> str:
    """Return a name for this host, because locks may not be visible on other hosts with the same
    folder.
    """
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def is_marked(handle: int) -> bool:
    """Mark a new file as in use. Return False if another process has found it first and will remove
    it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nobody removes unfinished files
        return True
    return os.fstat(handle).st_nlink > 0


def _remove_left(path: Path) -> None:
    """Remove the files of killed writers of this file."""
    for left in path.parent.glob(glob.escape(_prefix(path)) + "*-????????"):
        with contextlib.suppress(OSError):  # the file is being written, or belongs to somebody else
            handle = os.open(left, LEFT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(handle)
