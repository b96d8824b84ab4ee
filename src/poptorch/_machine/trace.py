"""The simulated schedule as trace events that Perfetto and browsers open.

Format: Trace Event Format, JSON; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimate import Action, Estimate

LANES = ("action", "compute", "exchange", "sync", "host", "streaming")


def trace(estimate: Estimate) -> dict[str, Any]:
    """Return the trace of one run of the schedule."""
    events: list[dict[str, Any]] = []
    for chip in estimate.chips:
        events.append(_named("process_name", chip.chip, 0, f"IPU {chip.chip}"))
        events += [_named("thread_name", chip.chip, lane, name) for lane, name in enumerate(LANES)]
    microseconds = 1e6 / estimate.clock
    for action in estimate.schedule:
        events += _events(action, microseconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _events(action: Action, scale: float) -> Iterator[dict[str, Any]]:
    """One bar for the action, and its parts below; on a chip they really alternate."""
    yield _bar(action, "action", action.name, action.start * scale, action.cycles * scale)
    at = action.start
    order = ("streaming", "host", "compute", "exchange", "sync")
    for part in order:
        length = action.parts.get(part, 0.0)
        if length:
            yield _bar(action, part, f"{action.name} {part}", at * scale, length * scale)
            at += length
    if action.sent:
        yield _bar(action, "exchange", f"{action.name} sends", at * scale, action.sent * scale)


def _bar(action: Action, lane: str, name: str, start: float, length: float) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": action.chip, "tid": LANES.index(lane),
        "ts": round(start, 3), "dur": round(length, 3), "cat": lane,
    }  # fmt: skip
