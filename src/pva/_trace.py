"""A trace of this machine, as ``PVTI_OPTIONS`` has one written, under libpva's names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from poptorch import Error
from poptorch._base import archive


class Event:
    """A stretch of time on a thread.

    Attributes:
        label: what was done.
        channel: what it belongs to.
        timestamp: seconds after the trace began.
        duration: seconds.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self.label, self.channel = row["name"], row.get("cat", "")
        self.timestamp, self.duration = row["ts"] / 1e6, row["dur"] / 1e6
        self._children: list[Event] = []

    def children(self) -> list[Event]:
        """Return the events inside this one, without those inside them."""
        return self._children

    def __repr__(self) -> str:
        return f"<{self.channel}.{self.label}: {self.duration:.6f} s>"


@dataclass(frozen=True)
class Thread:
    """A thread; ``events`` are those that lie in no other."""

    tid: int
    events: list[Event]


@dataclass(frozen=True)
class Process:
    """A process and its threads, by their numbers."""

    pid: int
    threads: dict[int, Thread]

    def thread(self, tid: int) -> Thread:
        """Return a thread by its number."""
        return self.threads[tid]


@dataclass(frozen=True)
class Trace:
    """A trace; ``processes`` by their numbers."""

    processes: dict[int, Process]

    def process(self, pid: int) -> Process:
        """Return a process by its number."""
        return self.processes[pid]


def openTrace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace in the Trace Event Format.

    Raises:
        poptorch.Error: there is none.
    """
    try:
        rows = json.loads(archive.read_text(path))["traceEvents"]
    except (Error, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error("There is no trace to open", got=f"{os.fspath(path)}: {error}") from None
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("ph") == "X":
            lanes.setdefault((row["pid"], row["tid"]), []).append(row)
    threads: dict[int, dict[int, Thread]] = {}
    for (pid, tid), own in lanes.items():
        threads.setdefault(pid, {})[tid] = Thread(tid, _nested(own))
    return Trace({pid: Process(pid, own) for pid, own in threads.items()})


def _nested(rows: list[dict[str, Any]]) -> list[Event]:
    """Put events inside those that were going on when they began."""
    outer: list[Event] = []
    stack: list[Event] = []
    for row in sorted(rows, key=lambda each: (each["ts"], -each["dur"])):
        event = Event(row)
        while stack and event.timestamp >= stack[-1].timestamp + stack[-1].duration:
            stack.pop()
        (stack[-1].children() if stack else outer).append(event)
        stack.append(event)
    return outer
