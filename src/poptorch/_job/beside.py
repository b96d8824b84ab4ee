"""Waiting for what goes to a single process."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any


class Beside:
    """Works that a thread waits for: torch closes a connection when a limit of waiting passes.

    That is so of what goes to a single process; what goes to all waits by other means.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._finish, name="poptorch messages", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        """Tell whether all are done, or one has failed."""
        return not self._thread.is_alive()

    def wait(self, limit: datetime.timedelta | None = None) -> None:
        """Wait until all are done.

        Raises:
            RuntimeError: one has failed, or the limit has passed.
        """
        self._thread.join(None if limit is None else limit.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the messages are still on their way")
        if self._error is not None:
            raise self._error
