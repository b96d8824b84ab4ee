"""The simulated schedule as trace events that Perfetto and browsers open.

Format: Trace Event Format, JSON; times in microseconds. What was measured on this machine is a
process of its own, apart from the chips, whose times are estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .estimate import Action, Estimate
    from .profile import Call

LANES = ("action", "compute", "exchange", "sync", "host", "streaming")
HERE = 1000
"""The process that stands for this machine."""
CALL = ("prepare", "device", "collect")
MEASURED = ("calls", "actions", "operators")
"""Lanes of this machine."""


class Span(NamedTuple):
    """An action or operator that was timed on this machine; seconds after the first call began."""

    name: str
    start: float
    seconds: float
    is_action: bool


def trace(
    estimate: Estimate, calls: Sequence[Call] = (), spans: Sequence[Span] = ()
) -> dict[str, Any]:
    """Return the trace of one run of the schedule, and of calls that were measured here.

    Args:
        estimate: has the schedule.
        calls: that were measured.
        spans: parts of one of them.
    """
    events: list[dict[str, Any]] = []
    for chip in estimate.chips:
        events.append(_named("process_name", chip.chip, 0, f"IPU {chip.chip} (estimated)"))
        events += [_named("thread_name", chip.chip, lane, name) for lane, name in enumerate(LANES)]
    microseconds = 1e6 / estimate.clock
    for action in estimate.schedule:
        events += _events(action, microseconds)
    if calls:
        events.append(_named("process_name", HERE, 0, "this machine (measured)"))
        events += [_named("thread_name", HERE, lane, name) for lane, name in enumerate(MEASURED)]
    for number, call in enumerate(calls):
        events += _measured(number, call)
    for name, start, seconds, is_action in spans:
        lane = MEASURED.index("actions" if is_action else "operators")
        events.append(_span(HERE, lane, name, start * 1e6, seconds * 1e6, MEASURED[lane]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _events(action: Action, scale: float) -> Iterator[dict[str, Any]]:
    """One bar for the action, and its parts below; on a chip they really alternate."""
    yield _bar(action, "action", action.name, action.start * scale, action.cycles * scale)
    at = action.start
    order = ("streaming memory", "host link", "compute", "exchange", "sync")
    for part in order:
        length = action.parts.get(part, 0.0)
        if length:
            lane = part.split()[0]
            yield _bar(action, lane, f"{action.name} {part}", at * scale, length * scale)
            at += length
    if action.sent:
        yield _bar(action, "exchange", f"{action.name} sends", at * scale, action.sent * scale)


def _bar(action: Action, lane: str, name: str, start: float, length: float) -> dict[str, Any]:
    return _span(action.chip, LANES.index(lane), name, start, length, lane)


def _measured(number: int, call: Call) -> Iterator[dict[str, Any]]:
    at = call.start
    for part in CALL:
        length = getattr(call, part)
        yield _span(HERE, 0, f"call {number}: {part}", at * 1e6, length * 1e6, part)
        at += length


def _span(
    process: int, thread: int, name: str, start: float, length: float, kind: str
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread,
        "ts": round(start, 3), "dur": round(length, 3), "cat": kind,
    }  # fmt: skip
