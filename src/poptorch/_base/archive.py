"""Read and write the files that this library saves: zip files of named parts with digests. Decides
which versions of the format are read, and refuses files that are damaged or incomplete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import VERSION, resources, safe_files
from .errors import AssertionFailure

FORMAT = 3
HEADER = "header.json"
LARGEST_LIST = 4 << 20  # bytes of a file's list of parts, enough for some ten thousand parts
LARGEST_JSON = 64 << 20  # bytes; as Python values, JSON needs up to twenty times as much
_REPLACE = "use an undamaged copy of the file, or save it again with this version of poptorch"


class InvalidFile(AssertionFailure):
    """A file that is damaged, incomplete, or was not written by this library."""


def refuse(path: str | os.PathLike[str], why: str, fix: str = _REPLACE) -> NoReturn:
    raise InvalidFile("Invalid file", got=f"{os.fspath(path)}: {why}", fix=fix)


def write(path: str | os.PathLike[str], parts: Mapping[str, bytes]) -> None:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    header = {"format": FORMAT, "poptorch": VERSION, "digests": digests}
    with safe_files.replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(HEADER, json.dumps(header))
        for name, data in parts.items():
            archive.writestr(name, data)


def read(path: str | os.PathLike[str]) -> dict[str, bytes]:
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                file.most = None
                _check_sizes(path, archive.infolist(), os.fstat(file.fileno()).st_size)
                header = json.loads(archive.read(HEADER))
                digests = {**header["digests"]}
                if header["format"] != FORMAT:
                    refuse(
                        path,
                        f"format {header['format']}, written by version {header['poptorch']}; this "
                        f"is version {VERSION}, which reads format {FORMAT}",
                        "compile and save the model again",
                    )
                parts = {name: archive.read(name) for name in digests}
        except InvalidFile:
            raise
        except Exception as error:  # zipfile and json raise many types of errors for damaged files
            refuse(
                path,
                (
                    "the file is not a complete file of this library "
                    f"({type(error).__name__}: {error})"
                ),
            )
    for name, data in parts.items():
        if hashlib.sha256(data).hexdigest() != digests[name]:
            refuse(path, f"part {name} is damaged")
    return parts


def from_json(data: bytes) -> Any:
    """Return the value of JSON from a file.

    Raises:
        ValueError: the data is not JSON, is too long, or is nested too deeply.
    """
    if len(data) > LARGEST_JSON:
        raise ValueError(f"{len(data)} bytes of JSON")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("the values are nested too deeply") from error


def read_text(path: str | os.PathLike[str], most: int | None = None) -> str:
    """Return the text of a regular file with at most ``most`` bytes, because a pipe might
    never end.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            refuse(path, f"{size} bytes")
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            refuse(path, str(error))


class _LimitedReader(io.BufferedReader):
    """Limits one read, because ``zipfile`` reads the list of parts before its length can
    be checked.
    """

    most: int | None = LARGEST_LIST

    def read(self, size: int | None = -1) -> bytes:
        if self.most is not None and size is not None and size > self.most:
            raise ValueError("the list of its parts is too long")
        return super().read(size)


def _opened(path: str | os.PathLike[str]) -> _LimitedReader:
    # Open without waiting, because opening a pipe would wait for a writer.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # no permission, a cycle of links, ...
        refuse(path, error.strerror or str(error))
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > resources.memory_size():
        os.close(handle)
        regular = stat.S_ISREG(status.st_mode)
        refuse(
            path,
            "it is larger than the memory of this machine"
            if regular
            else "it is not a regular file",
        )
    return _LimitedReader(io.FileIO(handle))


def _check_sizes(
    path: str | os.PathLike[str], entries: Sequence[zipfile.ZipInfo], size: int
) -> None:
    """Refuse parts that overlap or are compressed, because they could be far larger than
    the file.
    """
    for entry in entries:
        if entry.filename == HEADER and entry.file_size > LARGEST_LIST:
            refuse(path, "its header is too long")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            refuse(path, f"part {entry.filename} is compressed")
    if sum(entry.file_size for entry in entries) > size:
        refuse(path, "its parts are together larger than the file")
    if len({entry.filename for entry in entries}) != len(entries):
        refuse(path, "two of its parts have the same name")
