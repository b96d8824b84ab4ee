"""Files of several named parts that are whole or refused: a zip with a header of digests.

Written under a temporary name and renamed, so that nobody ever sees half a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .errors import AssertionFailure
from .version import VERSION

FORMAT = 1
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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


def read(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the parts of a file.

    Raises:
        FileNotFoundError: there is none.
        InvalidFile: it is damaged, or of another format; the message shows both versions.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for a writer
        refuse(path, "not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    refuse(path, f"part {info.filename} is compressed")
            header = json.loads(archive.read(HEADER))
            if header["format"] != FORMAT:
                refuse(
                    path,
                    f"format {header['format']}, written by version {header['poptorch']}; this is "
                    f"version {VERSION}, which reads format {FORMAT}",
                    "compile and save the model again",
                )
            parts = {name: archive.read(name) for name in header["digests"]}
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, NotImplementedError) as error:
        refuse(path, f"not a whole file of this library ({error})")
    for name, data in parts.items():
        if hashlib.sha256(data).hexdigest() != header["digests"][name]:
            refuse(path, f"part {name} is damaged")
    return parts
