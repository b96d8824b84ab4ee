"""Show the "Graph compilation" progress bar, which users and tools know from PopTorch."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

from .._base import log, terminal, timing

TICK = 1.0  # seconds between two updates of the current activity
LINES = 10  # updates between two lines if stderr is not a terminal


class CompilationProgressBar:
    """Called with (progress, total) while compiling; shows a tqdm bar on stderr.

    During long steps, a thread updates the seconds and the current activity. If stderr is not a
    terminal, the bar is replaced by single lines: one every ten seconds, and one at the end.

    Copies and pickles start without a bar, because a bar and its clock belong to one compilation.
    """

    _bar: Any = None
    _over: threading.Event | None = None
    _visible = True
    _first: float | None = None
    _last: float | None = None

    def __call__(self, progress: int, total: int = 100) -> None:
        """Show the progress. The first call opens the bar, and the call that reaches the total
        closes it.
        """
        now = time.monotonic()
        if self._first is None or (self._bar is None and progress < total):
            self._first = now
            self._bar = log.bar = _open_bar(total) if self._visible else None
            if self._bar is not None:
                self._over = threading.Event()
                name, begun = "poptorch progress", (self._bar, self._over)
                threading.Thread(target=_tick, args=begun, name=name, daemon=True).start()
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
        if self._over is not None:
            self._over.set()
            self._over = None
        if self._bar is not None:
            self._bar.close()
            self._bar = log.bar = None

    @property
    def elapsed(self) -> datetime.timedelta | None:
        """Return the time from the first call of the latest compilation to its last; None if there
        was none.
        """
        if self._first is None or self._last is None:
            return None
        return datetime.timedelta(seconds=self._last - self._first)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return "CompilationProgressBar()"


def _tick(bar: Any, over: threading.Event) -> None:
    ticks = 0
    while not over.wait(TICK):
        ticks += 1
        if doing := ": ".join(timing.doing):
            bar.show(doing, ticks)


class _Lines:
    """Print lines instead of a bar if stderr is a file or a pipe, which a bar would fill with
    carriage returns.
    """

    def __init__(self, total: int) -> None:
        self.n, self._total, self._begun = 0, total, time.monotonic()

    def update(self, more: int) -> None:
        self.n += more

    def show(self, doing: str, ticks: int) -> None:
        if ticks % LINES == 0:
            self._write(f", {doing}")

    def close(self) -> None:
        self._write("")

    def _write(self, doing: str) -> None:
        share, seconds = self.n / self._total, time.monotonic() - self._begun
        terminal.write_line(f"Graph compilation: {share:.0%} after {seconds:.0f} s{doing}")

    def clear(self, nolock: bool = False) -> None:
        """Do nothing. A bar makes room here for a line of the log, but lines need no room."""

    def refresh(self, nolock: bool = False) -> None:
        """Do nothing. A bar is drawn again here after a line of the log."""


def _open_bar(total: int) -> Any:
    from tqdm.asyncio import tqdm as on_terminals
    from tqdm.auto import tqdm  # shows a widget in a notebook

    if tqdm is on_terminals and not terminal.Stream("stderr").isatty():
        return _Lines(total)

    class Bar(tqdm):  # type: ignore[misc]
        # The default lock is shared between processes and deadlocks with forked data workers.
        _lock = threading.RLock()
        monitor_interval = 0

        def show(self, doing: str, ticks: int) -> None:
            self.set_postfix_str(doing)

    return Bar(
        total=total,
        desc="Graph compilation",
        file=terminal.Stream("stderr"),
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
