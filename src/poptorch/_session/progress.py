"""The "Graph compilation" bar (spec/runtime.md section 5) and the time that compiling takes."""

from __future__ import annotations

import datetime
import threading
import time

from tqdm import tqdm


class _Bar(tqdm):  # type: ignore[misc]
    """Without tqdm's process-wide lock and monitor thread: forked data workers inherit both."""

    monitor_interval = 0


_Bar.set_lock(threading.RLock())


class CompilationProgress:
    """Shows a bar from 0 to 100 while a model is compiled, and measures the time.

    Use as a context manager and call it with the share done, from 0 to 1.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._start = self._last = 0.0
        self._bar: _Bar | None = None

    def __enter__(self) -> CompilationProgress:
        self._start = self._last = time.perf_counter()
        if self._shown:
            self._bar = _Bar(
                total=100,
                desc="Graph compilation",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
            )
        return self

    def __call__(self, share: float) -> None:
        self._last = time.perf_counter()
        if self._bar is not None:
            self._bar.update(round(share * 100) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def elapsed(self) -> datetime.timedelta:
        """From the first report to the last."""
        return datetime.timedelta(seconds=self._last - self._start)
