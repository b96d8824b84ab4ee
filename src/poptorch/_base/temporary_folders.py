"""Make folders in the temporary directory that are removed after this process, even if it is
killed.

A killed process removes nothing. Therefore each folder contains a file that its process keeps
locked, and the next process that makes such a folder removes folders with unlocked files.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import safe_files

_IN_USE = "in-use"


def folder(prefix: str) -> Path:
    """Make a folder that is removed when this process ends.

    Raises:
        OSError: there is no temporary directory in which folders can be made.
    """
    path, handle = _made(prefix)
    atexit.register(_remove, path, handle, os.getpid())
    return path


@contextlib.contextmanager
def folder_within_block(prefix: str) -> Iterator[Path]:
    """Make a folder that is removed at the end of the block."""
    path, handle = _made(prefix)
    try:
        yield path
    finally:
        _remove(path, handle, os.getpid())


def _made(prefix: str) -> tuple[Path, int]:
    _remove_left(prefix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        handle = os.open(path / _IN_USE, safe_files.NEW, 0o600)
        if safe_files.is_marked(handle):
            return path, handle
        os.close(handle)  # another process has found the folder before it was marked


def _remove(path: Path, handle: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked copy
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def _remove_left(prefix: str) -> None:
    """Remove folders of this user whose processes have ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or is not such a folder
            status = left.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            handle = os.open(left / _IN_USE, safe_files.LEFT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
