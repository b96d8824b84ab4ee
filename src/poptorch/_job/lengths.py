"""How many calls this process has data for, as far as a loader has said."""

from __future__ import annotations

_latest = -1


def note(calls: int) -> None:
    """A loader begins an iteration of so many combined batches."""
    global _latest
    _latest = calls


def latest() -> int:
    """Return how many batches the latest iteration has; -1 if no loader has said."""
    return _latest
