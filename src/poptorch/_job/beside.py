"""Doing what waits for other processes in a thread, so that who needs it can look for them."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any


class Beside:
    """Something that a thread does, waited for as torch's works are.

    It is for what has no limit of waiting, or closes a connection when that passes: messages to a
    single process, what is asked of the store, the making of torch's groups.

    Args:
        do: is called at once; what it returns becomes ``result``.
    """

    def __init__(self, do: Callable[[], Any]) -> None:
        self.result: Any = None
        self._do = do
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._finish, name="poptorch messages", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        try:
            self.result = self._do()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Tell whether it is done, or has failed."""
        return not self._thread.is_alive()

    def wait(self, limit: datetime.timedelta | None = None) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: the limit has passed.
            Exception: what it raised.
        """
        self._thread.join(None if limit is None else limit.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the messages are still on their way")
        if self._error is not None:
            raise self._error
