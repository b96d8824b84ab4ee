"""Texts that all processes of a job read of one another, through the store that they share.

Not through gloo: it would take what another process exchanges instead for them, and end this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LONGEST = 0.05  # seconds between two looks


class Notes:
    """The texts of one process and of the others.

    Args:
        store: that all share.
        index, count: which process this is, of how many.
    """

    def __init__(self, store: Any, index: int, count: int) -> None:
        self._store, self._index, self._count = store, index, count
        self._written = 0  # the number of this process's latest text

    def exchange(self, number: int, text: str, is_over: Callable[[], bool]) -> list[str]:
        """Write this process's text and return those of all, once all have written theirs.

        Args:
            number: of the exchange, more each time.
            text: of this process.
            is_over: tells whether nobody needs them any more.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(f"text/{number}/{self._index}", text)
        keys = [f"text/{number}/{index}" for index in range(self._count)]
        pause = 1e-4
        while not self._store.check(keys):
            if is_over():
                return []
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        texts = [self._store.get(key).decode() for key in keys]
        if self._written:  # all have read their last text, or they would not have written this one
            self._store.delete_key(f"text/{self._written}/{self._index}")
        self._written = number
        return texts
