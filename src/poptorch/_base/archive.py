"""Files of several named parts that are whole or refused: a zip with a header of digests.

Written under a temporary name and renamed, so that nobody ever sees half a file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import stat
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from .errors import AssertionFailure
from .processes import is_running
from .version import VERSION

FORMAT = 2
HEADER = "header.json"


class InvalidFile(AssertionFailure):
    """A file that is damaged, incomplete, or nothing that this library wrote."""

    __module__ = "poptorch"


def refuse(path: str | os.PathLike[str], why: str, fix: str | None = None) -> NoReturn:
    """Raise InvalidFile.

    Raises:
        InvalidFile: always.
    """
    raise InvalidFile("Invalid file", got=f"{os.fspath(path)}: {why}", fix=fix)


def write(path: str | os.PathLike[str], parts: Mapping[str, bytes]) -> None:
    """Write a file of these parts, replacing an earlier one."""
    path = Path(path)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    header = {"format": FORMAT, "poptorch": VERSION, "digests": digests}
    _remove_orphans(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path, os.getpid()))
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(HEADER, json.dumps(header))
            for name, data in parts.items():
                archive.writestr(name, data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _prefix(path: Path, pid: int | str) -> str:
    return f".{path.name}.{pid}-"


def _remove_orphans(path: Path) -> None:
    """Remove what processes left that were killed while they wrote this file."""
    for left in path.parent.glob(glob.escape(f".{path.name}.") + "*-????????"):
        pid = left.name.removeprefix(f".{path.name}.").partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            with contextlib.suppress(OSError):  # another process has just removed it
                left.unlink()


def read(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the parts of a file; together they are no larger than the file.

    Raises:
        FileNotFoundError: there is none.
        InvalidFile: it cannot be opened, or is damaged, of another format, or no regular file; of
            another format the message shows both versions.
    """
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check_sizes(path, archive.infolist(), os.fstat(file.fileno()).st_size)
                header = json.loads(archive.read(HEADER))
                if header["format"] != FORMAT:
                    refuse(
                        path,
                        f"format {header['format']}, written by version {header['poptorch']}; this "
                        f"is version {VERSION}, which reads format {FORMAT}",
                        "compile and save the model again",
                    )
                parts = {name: archive.read(name) for name in header["digests"]}
        except InvalidFile:
            raise
        except Exception as error:  # zipfile and json raise many kinds at damage
            refuse(path, f"not a whole file of this library ({type(error).__name__}: {error})")
    for name, data in parts.items():
        if hashlib.sha256(data).hexdigest() != header["digests"][name]:
            refuse(path, f"part {name} is damaged")
    return parts


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    # Not waiting, because opening a pipe would wait for somebody to write to it.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # no permission, links without an end, ...
        refuse(path, error.strerror or str(error))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        refuse(path, "no regular file")
    return os.fdopen(handle, "rb")


def _check_sizes(
    path: str | os.PathLike[str], entries: Sequence[zipfile.ZipInfo], size: int
) -> None:
    """Parts that overlap or are compressed could be far larger than the file."""
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            refuse(path, f"part {entry.filename} is compressed")
    if sum(entry.file_size for entry in entries) > size:
        refuse(path, "its parts are larger than it is")
    if len({entry.filename for entry in entries}) != len(entries):
        refuse(path, "two parts have one name")
