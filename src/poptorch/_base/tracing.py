"""One capture or compilation at a time: torch's tracer has state that all threads share.

Another thread's first call waits for this one's; calls of compiled models do not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()


def _renew() -> None:  # in a forked process, which does not have the thread that holds it
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within the block no other thread captures or compiles."""
    with _lock:
        yield
