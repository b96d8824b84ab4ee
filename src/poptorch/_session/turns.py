"""One call of a wrapped model at a time, in the process that compiled it."""

from __future__ import annotations

import functools
import os
import threading

import torch

from .. import backends
from .._base import log, processes
from .._base.errors import StateError


class Turns:
    """The lock of one wrapped model."""

    def __init__(self) -> None:
        self._process = processes.fork_generation()
        self._lock = threading.RLock()

    def take(self, compiled: bool) -> threading.RLock:
        """Return the lock that a call holds.

        Args:
            compiled: whether the model is.

        Raises:
            StateError: it was compiled before this process was forked: the device and a compilation
                in progress are the other process's.
        """
        now = processes.fork_generation()
        if now != self._process:
            if compiled:
                raise StateError(
                    "The model was compiled before this process was forked",
                    got=f"process {os.getpid()}, and a wrapper that process {os.getppid()} or one "
                    "before it has used",
                    fix=(
                        "wrap the model in the new process",
                        "start processes with multiprocessing.get_context('spawn')",
                    ),
                )
            self._process, self._lock = now, threading.RLock()
        if now:
            _without_lost_threads(now)
        return self._lock


@functools.cache
def _without_lost_threads(process: int) -> None:
    """Let operators run in a forked process; looked at once in each."""
    if processes.fork_lost_threads() and torch.get_num_threads() > 1:
        log.python.warning(
            "This process was forked from one whose operators ran on several threads, which do not "
            "survive that: here they run on one. Fork first, or use the start method 'spawn'"
        )
        backends.use_one_thread()
