"""The standard streams: closed, full or not there, they never fail what writes to them.

Whatever goes there is optional: logs, progress bars, printed tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

_FAILURES = (OSError, ValueError)  # a full disk or a closed pipe; a file object that was closed


class Stream:
    """What sys.stdout or sys.stderr is now: notebooks and tests replace them."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _now(self) -> TextIO | None:
        return getattr(sys, self._name)  # type: ignore[no-any-return]

    def write(self, text: str) -> int:
        with contextlib.suppress(*_FAILURES):
            if self._now is not None:
                return self._now.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_FAILURES):
            if self._now is not None:
                self._now.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(*_FAILURES):
            return self._now is not None and self._now.isatty()
        return False

    def __getattr__(self, name: str) -> Any:  # the encoding, or how wide it is
        return getattr(self._now, name)


def write_line(text: str, name: str = "stderr") -> None:
    stream = Stream(name)
    stream.write(f"{text}\n")
    stream.flush()


def open_closed_descriptors() -> None:
    """Let no file of ours get the number of a standard stream that the process began without."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)
