"""Whether a core has nothing to do: then compiling beside the run takes nothing from it."""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE = 0.6  # cores that have nothing to do: what is started then takes nothing from the run
SHORTEST = 0.05  # seconds: less says nothing, the system counts in hundredths


class Cores:
    """Watches how much of the processor's time is idle, on Linux."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def idle(self) -> float:
        """Return how many of this process's cores had nothing to do since the last time.

        0 at the first time, where there is one core, and where it cannot be known.
        """
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        seconds = idle_seconds()
        if available == 1 or seconds is None:
            return 0.0
        now = time.perf_counter()
        if self._last is None:
            self._last = now, seconds
        before, idle_before = self._last
        if now - before < SHORTEST:
            return 0.0
        self._last = now, seconds
        share = (seconds - idle_before) / (now - before) / (os.cpu_count() or 1)
        return share * available


def idle_seconds(file: str = "/proc/stat") -> float | None:
    """Return how long all cores together had nothing to do since the system started."""
    try:
        _, *ticks = Path(file).read_text().partition("\n")[0].split()
    except OSError:
        return None
    return (int(ticks[3]) + int(ticks[4])) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for disks
