"""Find out whether other processes still run, and what was lost when this process was forked."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from later ones with the same number."""

    pid: int
    # seconds after the start of the machine; None if the process does not run
    started: float | None
    command: str
    user: str

    @staticmethod
    def current() -> ProcessIdentity:
        pid = os.getpid()
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user without a name
            user = str(os.getuid())
        return ProcessIdentity(pid, _started(pid), Path(sys.executable or "python").name, user)

    @property
    def lives(self) -> bool:
        """Return whether the process still runs. A zombie process does not."""
        return self.started is not None and _started(self.pid) == self.started


def _started(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        # Both use the same clock, which may be changed at any time.
        started = process.create_time() - psutil.boot_time()
        return None if process.status() in _DEAD else round(started, 2)
    except psutil.NoSuchProcess:
        return None


def is_running(pid: int) -> bool:
    return _started(pid) is not None


forks = 0  # number of forks between this process and the one that imported the library
# threads of other kinds than Python's; OpenMP waits for its threads, also in eager torch
fork_lost_threads = False


def _before_fork() -> None:
    global fork_lost_threads
    with contextlib.suppress(OSError):  # only Linux counts them
        fork_lost_threads = len(os.listdir("/proc/self/task")) > threading.active_count()


def _after_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
