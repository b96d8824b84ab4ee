"""How many calls this process has data for, and in which order, as far as a loader has said."""

from __future__ import annotations

_latest: tuple[int, int | None] = (-1, None)


def note(calls: int, seed: int | None) -> None:
    """A loader begins an iteration.

    Args:
        calls: how many combined batches it has; -1 if that is not known.
        seed: of the order in which all processes divide the data; None for its own order.
    """
    global _latest
    _latest = calls, seed


def latest() -> tuple[int, int | None]:
    """Return what was noted of the latest iteration; -1 and None if no loader has said."""
    return _latest
