"""One capture or compilation at a time: torch's tracer has state that all threads share.

Another thread's first call waits for this one's; calls of compiled models do not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_LOCK = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within the block no other thread captures or compiles."""
    with _LOCK:
        yield
