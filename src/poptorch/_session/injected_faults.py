"""Raise errors on purpose, so that error handling can be tested without broken hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

PLACES = ("compile", "attach", "run")
armed: list[tuple[str, BaseException]] = []


@contextlib.contextmanager
def injected(place: str, error: BaseException) -> Iterator[None]:
    """Make the next event of this kind within the block fail once with this error."""
    fault = (place, error)
    armed.append(fault)
    try:
        yield
    finally:
        if fault in armed:
            armed.remove(fault)


def check(place: str) -> None:
    for fault in armed:
        if fault[0] == place:
            armed.remove(fault)
            raise fault[1]
