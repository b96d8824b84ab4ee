"""Signals wait while weights are written: ``deferred`` notes them, ``check`` runs handlers."""

from __future__ import annotations

import _signal  # signal's functions look every handler up in an enum: 10 us of every call
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = sorted(int(number) for number in signal.valid_signals())
_main = threading.main_thread().ident
_handlers: list[Any] = []  # of all signals, when they were last looked at,
_theirs: dict[int, Handler] = {}  # and those of them that are functions
_noted: list[tuple[int, FrameType | None]] = []
_depth = 0


def _note(signum: int, frame: FrameType | None) -> None:
    _noted.append((signum, frame))


class deferred:  # noqa: N801 (used as a function)
    """Hold signals back; may be nested. Python runs no handlers in other threads."""

    __slots__ = ("_mine", "_swapped")

    def __enter__(self) -> None:
        global _depth
        self._swapped: dict[int, Handler] = {}
        self._mine = threading.get_ident() == _main
        if not self._mine:
            return
        if not _depth:
            _look()
            self._swapped = _theirs
            try:
                for number in _theirs:
                    _signal.signal(number, _note)
            except BaseException:  # a handler that was not noted yet
                _put_back(self._swapped)
                raise
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if not self._mine:
            return
        _depth -= 1
        if not _depth:
            _put_back(self._swapped)
            check()


def _look() -> None:
    global _handlers, _theirs
    handlers = list(map(_signal.getsignal, _NUMBERS))
    if handlers != _handlers:
        present = zip(_NUMBERS, handlers, strict=True)
        _theirs = {number: handler for number, handler in present if callable(handler)}
        _handlers = handlers


def _put_back(handlers: dict[int, Handler]) -> None:
    try:
        for number, handler in handlers.items():
            # Unless it is back, or a handler has chosen another one.
            if _signal.getsignal(number) is _note:
                _signal.signal(number, handler)
    except BaseException:  # one that is back already was called, and raised
        _put_back(handlers)
        raise


def _renew() -> None:
    """A forked process has one thread, and signals of its own."""
    global _depth, _main
    _depth, _main = 0, threading.get_ident()
    _noted.clear()
    _put_back(_theirs)


os.register_at_fork(after_in_child=_renew)


def check() -> None:
    """Run the handlers of noted signals; one that raises leaves the rest to the next check."""
    while _noted and threading.get_ident() == _main:
        number, frame = _noted.pop(0)
        handler = _theirs.get(number)
        if handler is not None:
            handler(number, frame)
