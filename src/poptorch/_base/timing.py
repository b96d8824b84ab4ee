"""Measure how long the parts of a compilation take, in wall and processor seconds, for the log."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar

from . import log
from .tables import table


class Parts:
    """Seconds by part, in the order of their beginning. The time of a nested part does not count
    for the outer part.
    """

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}
        self._names = ["the rest"]
        self._since = _now()

    def turn(self, name: str | None) -> None:
        """Begin a part, or end the one that began last."""
        now, current = _now(), self._names[-1]
        wall, used = self._spent.get(current, (0.0, 0.0))
        self._spent[current] = wall + now[0] - self._since[0], used + now[1] - self._since[1]
        self._since = now
        if name is None:
            self._names.pop()
        else:
            self._names.append(name)

    def text(self) -> str:
        total = tuple(map(sum, zip(*self._spent.values(), strict=True)))
        rows = [[n, f"{wall:.2f}", f"{used:.2f}"] for n, (wall, used) in self._spent.items()]
        shown = [row for row in rows if row[1:] != ["0.00", "0.00"]]
        head, last = ["part", "wall", "processor"], ["all", *(f"{s:.2f}" for s in total)]
        return "\n".join(table([head, *shown, last]))


def _now() -> tuple[float, float]:
    times = os.times()  # includes the processes that this process waited for
    return time.perf_counter(), sum(times[:4])


doing: list[str] = []
"""Names of the parts that have begun, for the progress bar, which another thread shows."""
_measured: ContextVar[Parts | None] = ContextVar("poptorch_parts", default=None)


@contextlib.contextmanager
def measured() -> Iterator[Parts]:
    """Measure the parts within the block, and log them."""
    parts = Parts()
    token = _measured.set(parts)
    try:
        yield parts
    finally:
        _measured.reset(token)
        parts.turn(None)
    log_times(os.getpid(), parts.text())


def log_times(process: int, text: str) -> None:
    log.engine.debug("Seconds spent in process %d, by part:\n%s", process, text)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    parts = _measured.get()
    doing.append(name)
    if parts is not None:
        parts.turn(name)
    try:
        yield
    finally:
        doing.remove(name)
        if parts is not None:
            parts.turn(None)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Show a name on the progress bar within the block. It has no row in the table."""
    doing.append(name)
    try:
        yield
    finally:
        doing.remove(name)
