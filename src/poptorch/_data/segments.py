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

_FOLDER = Path("/dev/shm")
_GROUP = 2  # field of /proc/<pid>/stat after the name: state, parent, group


def members(group: int) -> set[int]:
    """Return the processes of a process group, as far as this system tells."""
    processes = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return {pid for pid in processes if (fields := _stat(pid)) and int(fields[_GROUP]) == group}


def is_running(pid: int) -> bool:
    """Whether there is such a process, as far as this system tells."""
    return _stat(pid) is not None


def _stat(pid: int) -> list[str] | None:
    """Return state, parent, group and so on of a process; None when there is none any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


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
