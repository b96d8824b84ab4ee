"""Write to the standard streams without failing if they are closed, full or missing.

Everything that is written there is optional: logs, progress bars, printed tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

_FAILURES = (OSError, ValueError)  # a full disk or a closed pipe; a closed file object


class Stream:
    """The present sys.stdout or sys.stderr, because notebooks and tests replace them."""

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

    def __getattr__(self, name: str) -> Any:  # for example the encoding, or the width
        return getattr(self._now, name)


def write_line(text: str, name: str = "stderr") -> None:
    stream = Stream(name)
    stream.write(f"{text}\n")
    stream.flush()


def open_closed_descriptors() -> None:
    """Keep files of ours from getting the number of a standard stream that was closed when the
    process started.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)
