"""Ctrl-C that never lands in the middle of an update of the weights.

Within ``deferred`` an interrupt is only noted; ``check`` raises it where the state is whole.
"""

from __future__ import annotations

import _signal  # signal's functions look every handler up in an enum: 10 us of every call
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_noted = False


def _note(signum: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold interrupts back until ``check`` or the end of the block.

    Only Python's own handler is held back: programs that handle the signal keep doing so.
    """
    mine = (
        threading.current_thread() is threading.main_thread()
        and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not mine:
        yield
        return
    _signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        check()


def check() -> None:
    """Raise the interrupt that was noted, if any.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C within ``deferred``.
    """
    global _noted
    if _noted:
        _noted = False
        raise KeyboardInterrupt
