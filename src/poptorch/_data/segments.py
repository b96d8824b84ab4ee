"""Shared memory that torch's workers leave behind when they end at the wrong moment.

A worker gives the memory of a tensor a name, opens it, and takes the name away again. One that is
ended in between, which torch does to workers that are slow to stop, leaves the name and with it
the memory until the machine is restarted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from .._base.processes import is_running

_FOLDER = Path("/dev/shm")


def members(group: int) -> set[int]:
    """Return the processes of a process group."""
    return {pid for pid in psutil.pids() if _group_of(pid) == group and is_running(pid)}


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def remove(processes: Collection[int], seconds: float = 0.0) -> set[int]:
    """Remove what those of the processes left that end within some seconds; return the others."""
    end, running = time.monotonic() + seconds, _running(processes)
    while running and time.monotonic() < end:
        time.sleep(0.001)
        running = _running(running)
    gone = {str(pid) for pid in processes if pid not in running}
    for name in os.listdir(_FOLDER) if gone and _FOLDER.is_dir() else ():
        kind, _, rest = name.partition("_")
        if kind == "torch" and rest.partition("_")[0] in gone:
            with contextlib.suppress(OSError):
                (_FOLDER / name).unlink()
    return running


def _running(processes: Collection[int]) -> set[int]:
    return {pid for pid in processes if is_running(pid)}
