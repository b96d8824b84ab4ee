"""What a forked process must know: that it was forked, and whether operators had threads before.

A fork copies one thread. Locks that another one held stay locked, and OpenMP waits for its threads
for ever, in eager torch too.
"""

from __future__ import annotations

import contextlib
import os
import threading

_generation = 0
_lost_threads = False


def generation() -> int:
    """Return how many forks lie between this process and the one that imported the library."""
    return _generation


def lost_threads() -> bool:
    """Tell whether the process that this one was forked from had threads that are not Python's."""
    return _lost_threads


def _before() -> None:
    global _lost_threads
    with contextlib.suppress(OSError):  # elsewhere than on Linux nobody counts them
        _lost_threads = len(os.listdir("/proc/self/task")) > threading.active_count()


def _after() -> None:
    global _generation
    _generation += 1


os.register_at_fork(before=_before, after_in_child=_after)
