"""How long a consumer waited for data, and what that says about the run."""

from __future__ import annotations

import time

from .._base import log

_NEGLIGIBLE = 0.05  # share of waiting below which loading is not what limits a run


class Waiting:
    """Adds up the waits of one iteration of the data.

    Attributes:
        elements: how many were waited for, the end included.
        seconds: time spent waiting for them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count anew."""
        self.elements = 0
        self.seconds = 0.0
        self._first = 0.0
        self._begin = 0.0

    def begin(self) -> None:
        """Begin one wait."""
        self._begin = time.perf_counter()
        if not self.elements:
            self._first = self._begin

    def end(self) -> None:
        """End the wait."""
        self.seconds += time.perf_counter() - self._begin
        self.elements += 1

    def report(self) -> None:
        """Log the verdict on the iteration that has ended at DEBUG."""
        total = time.perf_counter() - self._first
        log.python.debug("%d elements: %s", self.elements - 1, verdict(self.seconds, total))


def verdict(waited: float, total: float) -> str:
    """Say in one line what limited a run.

    Args:
        waited: seconds that the consumer waited for data.
        total: seconds that the run took.
    """
    share = waited / total if total else 0.0
    spent = f"{waited:.2f} s of {total:.2f} s ({share:.0%}) went into waiting for data"
    if share < _NEGLIGIBLE:
        return f"{spent}; the device limits the run, not the host"
    return f"{spent}; the host limits the run, which could take {total - waited:.2f} s"
