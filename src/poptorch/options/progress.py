"""The "Graph compilation" progress bar that users and tools know."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

from .._base import log, terminal


class CompilationProgressBar:
    """Called with (progress, total) while compiling; shows a tqdm bar on stderr.

    Copies and pickles start afresh: a live bar and its clock belong to one compilation.
    """

    _bar: Any = None
    _visible = True
    _first: float | None = None
    _last: float | None = None

    def __call__(self, progress: int, total: int = 100) -> None:
        """Show the progress; the first call opens the bar and reaching the total closes it."""
        now = time.monotonic()
        if self._first is None or (self._bar is None and progress < total):
            self._first = now
            self._bar = log.bar = _open_bar(total) if self._visible else None
        self._last = now
        if self._bar is not None:
            self._bar.update(progress - self._bar.n)
            if progress >= total:
                self.close()

    def reset(self, visible: bool = True) -> None:
        """Begin another compilation: the next call starts the clock and a new bar."""
        self.close()
        self._visible = visible
        self._first = self._last = None

    def close(self) -> None:
        """Leave the bar as it is and start a new one at the next call."""
        if self._bar is not None:
            self._bar.close()
            self._bar = log.bar = None

    @property
    def elapsed(self) -> datetime.timedelta | None:
        """Time from the first call of the latest compilation to its last, None before any."""
        if self._first is None or self._last is None:
            return None
        return datetime.timedelta(seconds=self._last - self._first)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return "CompilationProgressBar()"


def _open_bar(total: int) -> Any:
    from tqdm.auto import tqdm  # a widget in a notebook

    class Bar(tqdm):  # type: ignore[misc]
        # The default lock is shared between processes and deadlocks with forked data workers.
        _lock = threading.RLock()
        monitor_interval = 0

    return Bar(
        total=total,
        desc="Graph compilation",
        file=terminal.Stream("stderr"),
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
    )
