"""Saying in the log for whom a process waits: nobody should have to guess."""

from __future__ import annotations

import time

from .._base import log

IMPATIENT = 10.0
"""Seconds of waiting after which a line says for whom; then after twice as many, and so on."""


class Patience:
    """One wait of a process.

    Args:
        index: which process this is.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._began, self._limit = time.monotonic(), IMPATIENT

    def say(self, whom: str, why: str) -> None:
        """Say so if it has become long.

        Args:
            whom: it waits for; nothing is said of nobody.
            why: what it would do then.
        """
        waited = time.monotonic() - self._began
        if waited > self._limit and whom:
            self._limit *= 2
            text = "Process %d has waited %.0f s for %s, to %s"
            log.python.warning(text, self._index, waited, whom, why)
