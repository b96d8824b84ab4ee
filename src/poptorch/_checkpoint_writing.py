"""Writing a checkpoint while its run goes on: what is written was copied before."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ._base import archive, log

Files = Mapping[Path, Mapping[str, bytes]]
"""By path the parts of each."""
_LOOK = 0.05  # seconds


def write(files: Files) -> None:
    """Write files one after the other; each is whole as soon as it is there."""
    for path, parts in files.items():
        archive.write(path, parts)


def synchronise(folder: Path) -> None:
    """Have the disk write what is in a folder."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Writing:
    """A checkpoint on its way to the disk, in a thread.

    Args:
        files: those of this process.
        awaited: those of others that must be there, too.
        finish: what is done when all are there.
        patience: seconds for which the end of this process waits for others' files.
    """

    def __init__(
        self, files: Files, awaited: Sequence[Path], finish: Callable[[], None], patience: float
    ) -> None:
        self._files, self._awaited, self._finish = files, awaited, finish
        self._patience = patience
        self._abandoned = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, name="poptorch checkpoint", daemon=True)
        atexit.register(self._leave)
        self._thread.start()

    def _go(self) -> None:
        try:
            write(self._files)
            while not all(path.exists() for path in self._awaited):
                if self._abandoned.wait(_LOOK):
                    return
            self._finish()
        except BaseException as error:  # raised where somebody waits
            self._error = error

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            OSError: it could not be written.
        """
        self._thread.join()
        atexit.unregister(self._leave)
        if self._error is not None:
            raise self._error

    def _leave(self) -> None:
        """The process ends: others may never write what is waited for."""
        self._thread.join(self._patience)
        self._abandoned.set()
        if self._thread.is_alive() or self._error is not None:
            why = self._error or "files of other processes are not there"
            log.python.warning("The last checkpoint is not whole: %s", why)
