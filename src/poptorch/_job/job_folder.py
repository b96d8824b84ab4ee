"""Let the processes of a job on one machine meet in a folder that only this user can enter.

Torch's store listens at a port, and exchanges values with everybody who connects. The file system
protects a folder from other users, and nothing listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from .._base import env, folders, log
from .._base.errors import StateError

_OWNER = "owner"  # a file that process 0 has locked
_PRIVATE = (
    "set POPTORCH_JOB_DIR to the same folder for all processes; only you may be able to write to it"
)
# a folder without changes for this number of seconds belongs to no running job
_FORGOTTEN = 24 * 3600.0
_PATIENCE, _PAUSE = 10.0, 0.005  # seconds, to wait for a value that has just existed


class FolderStore:
    """The part of the interface of torch's stores that is used. Each value is a file, which is
    complete when it appears.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, key: str, value: str) -> None:
        unfinished = self.path / f".{os.getpid()}-{threading.get_ident()}"
        with _as_torchs():
            try:
                unfinished.write_text(value)
            # the last process of an earlier job has just removed the folder
            except FileNotFoundError:
                self.path.mkdir(mode=0o700)
                unfinished.write_text(value)
            unfinished.replace(self._file(key))

    def get(self, key: str) -> bytes:
        until = time.monotonic() + _PATIENCE
        with _as_torchs():
            while not self.check([key]) and time.monotonic() < until:
                time.sleep(_PAUSE)
            return self._file(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def delete_key(self, key: str) -> None:
        with _as_torchs():
            self._file(key).unlink(missing_ok=True)

    def clone(self) -> FolderStore:
        return self

    def _file(self, key: str) -> Path:
        return self.path / f"{quote(key, safe='')}.value"


@contextlib.contextmanager
def _as_torchs() -> Iterator[None]:
    """Raise a RuntimeError, as torch's stores do if they cannot be reached any more."""
    try:
        yield
    except OSError as error:
        raise StateError(
            "The folder in which the processes of this job meet cannot be used",
            got=f"{error.filename}: {error.strerror}",
            fix=_PRIVATE,
        ) from error


class JobFolder:
    """The folder of one job, with a folder for each start."""

    def __init__(self, job: Sequence[str], index: int, count: int) -> None:
        base = _base()
        self._index, self._count = index, count
        self._path = base / hashlib.sha256("\n".join(job).encode()).hexdigest()[:16]
        with _as_torchs():
            self._path.mkdir(mode=0o700, exist_ok=True)
            if index == 0:
                self._lock = self._locked(job)
                _forget(base)
        self.store = FolderStore(self._path)

    def _locked(self, job: Sequence[str]) -> int:
        """Lock the folder until this process ends. A forked child does not hold the lock."""
        lock = os.open(self._path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise StateError(
                "The processes of another job already meet at this address and port",
                got=f"{' '.join(filter(None, job))}, in {self._path}",
                fix=(
                    "choose another MASTER_PORT for this job",
                    "or end the other job first",
                ),
            ) from error
        return lock

    def of_start(self, name: str) -> FolderStore:
        """Return the store of the processes that have agreed on a name."""
        store = FolderStore(self._path / name)
        with _as_torchs():
            store.path.mkdir(mode=0o700, exist_ok=True)
        return store

    def torchs_file(self, name: str) -> str:
        """Return the file of one of torch's stores, which removes it together with its last object.

        Nothing else may remove it, because the object's destructor looks for it, and an error there
        ends the process.
        """
        return str(self._path / f"{name}.torch")

    def leave(self, start: FolderStore) -> None:
        """Record that this process no longer needs the start's folder. The last one removes it."""
        try:
            start.set(f"left/{self._index}", "")
            if self._index == 0:
                os.unlink(self._path / _OWNER)
                os.close(self._lock)
            if start.check([f"left/{index}" for index in range(self._count)]):
                shutil.rmtree(start.path)
                self._remove(start.path.name)
        except (OSError, RuntimeError) as error:  # it will be removed as a forgotten folder
            log.python.debug(
                "The folder in which the processes met could not be removed: %s", error
            )

    def _remove(self, name: str) -> None:
        """Remove the folder, except for what the next start of the job has created there."""
        invited, tokens = json.loads(self.store.get("invited"))
        if invited != name:
            return
        self.store.delete_key("invited")
        for index, token in enumerate(tokens):
            if self.store.get(f"arrived/{index}").decode() == token:
                self.store.delete_key(f"arrived/{index}")
        for index in range(self._count):
            self.store.delete_key(f"accepted/{name}/{index}")
        self._path.rmdir()


def _base() -> Path:
    """Return the folder of the user's jobs. Raise an error if anybody else can enter or
    change it.
    """
    chosen, temporary = env.get("POPTORCH_JOB_DIR"), folders.temporary()
    base = Path(chosen or temporary or "", "" if chosen else f"poptorch-jobs-{os.getuid()}")
    why = folders.problem_with(base) if chosen or temporary else "there is no temporary directory"
    if why is not None:
        raise StateError(
            "The processes of this job cannot meet in a private folder",
            got=f"{base}: {why}",
            fix=_PRIVATE,
        )
    return base


def _forget(base: Path) -> None:
    """Remove folders of killed jobs. A running one writes a heartbeat every second."""
    for path in base.glob("*/"):
        with contextlib.suppress(OSError):  # another process removes it, too
            latest = max(each.stat().st_mtime for each in (path, *path.glob("*/")))
            if time.time() - latest > _FORGOTTEN:
                shutil.rmtree(path)
