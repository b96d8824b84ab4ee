"""What a process did when, written at its end in the Trace Event Format."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from pathlib import Path
from typing import Any


class HostTrace:
    """Events of this process.

    Args:
        directory: the trace is written there, as ``trace_PID.json``; made if it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._began = directory.absolute(), time.perf_counter()
        self._pid = os.getpid()
        self._events: list[dict[str, Any]] = []
        atexit.register(self.write)

    def add(self, channel: str, name: str, start: float, end: float) -> None:
        """Note an event of this thread.

        Args:
            channel, name: what it is.
            start, end: seconds of ``time.perf_counter``.
        """
        self._events.append(
            {
                "ph": "X", "cat": channel, "name": name, "pid": self._pid,
                "tid": threading.get_native_id(), "ts": 1e6 * (start - self._began),
                "dur": 1e6 * (end - start),
            }
        )  # fmt: skip

    def write(self) -> None:
        """Write what has been noted; forked processes leave that to their parent."""
        if self._events and os.getpid() == self._pid:
            self._directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"})
            (self._directory / f"trace_{self._pid}.json").write_text(text)
