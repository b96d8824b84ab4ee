"""Decide when a signal such as Ctrl-C takes effect: ``deferred`` delays signals while weights are
written, and ``check`` runs their handlers.

While a model is captured and compiled, signals are not delayed. ``delivering`` makes sure that an
exception from a handler is not lost: it raises it again if torch or Python drop it. ``allowed`` is
for compiling within ``deferred``.
"""

from __future__ import annotations

# signal's functions look up every handler in an enum, which takes 10 us of every call
import _signal
import atexit
import functools
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = sorted(int(number) for number in signal.valid_signals())
_main = threading.main_thread().ident
_handlers: list[Any] = []  # the handlers of all signals, when they were last read
_theirs: dict[int, Handler] = {}  # those handlers that are functions
_RESEND_SECONDS = 0.5  # seconds until a handler's exception is raised again
noted: list[tuple[int, FrameType | None]] = []  # recorded signals, which ``check`` handles
_depth = 0


def _note(signum: int, frame: FrameType | None) -> None:
    noted.append((signum, frame))


class deferred:  # noqa: N801 (used as a function)
    """Delay signals. Blocks may be nested. Python does not run handlers in other threads."""

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        global _depth
        self._mine = get_ident() == _main
        if not self._mine:
            return
        if not _depth:
            if [*map(_signal.getsignal, _NUMBERS)] != _handlers:
                _read_handlers()
            try:
                for number in _theirs:
                    _signal.signal(number, _note)
            except BaseException:  # a handler that was not replaced yet
                _restore_handlers(_theirs)
                raise
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if not self._mine:
            return
        _depth -= 1
        if not _depth:
            _restore_handlers(_theirs)
            if noted:
                check()


class allowed:  # noqa: N801
    """Run handlers immediately within ``deferred``, at a point where the state is consistent."""

    def __enter__(self) -> None:
        self._mine = get_ident() == _main and _depth > 0
        if self._mine:
            try:
                _restore_handlers(_theirs)
                check()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self._mine:
            for number, handler in _theirs.items():
                if _signal.getsignal(number) is handler:
                    _signal.signal(number, _note)


class delivering:  # noqa: N801
    """Raise a handler's exception until it leaves the block.

    Python drops an exception in a callback, as in some imports, and torch ignores many. Therefore a
    thread sends the signal repeatedly, and the block always ends with the exception.
    """

    def __enter__(self) -> None:
        self._raised: BaseException | None = None
        self._number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="poptorch signals", daemon=True)
        self._frame: FrameType | None = sys._getframe(1)
        self._swapped: dict[int, tuple[Any, Handler]] = {}
        if get_ident() != _main:
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler is not _note:
                self._swapped[number] = handler, self._raising(handler)
                _signal.signal(number, self._swapped[number][1])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        raised = self._raised
        self._leave()
        if raised is not None and (error is None or isinstance(error, Exception)):
            raise raised

    def _leave(self) -> None:
        self._over.set()
        self._frame = None
        if self._thread.is_alive():
            self._thread.join()
        # Each call first runs handlers of pending signals, so none is pending after the last call.
        for number, (handler, own) in self._swapped.items():
            if _signal.getsignal(number) is own:
                _signal.signal(number, handler)

    def _raising(self, handler: Handler) -> Handler:
        def handle(number: int, frame: FrameType | None) -> None:
            if self._raised is None:
                try:
                    handler(number, frame)
                except BaseException as error:
                    self._raised, self._number = error, number
                    self._thread.start()
                    raise
            elif number != self._number:
                handler(number, frame)
            elif self._over.is_set():
                return
            elif _is_within(frame, self._frame):
                raise self._raised
            else:  # the exception was raised just when the block was about to end
                self._leave()

        return handle

    def _send(self) -> None:
        while not self._over.wait(_RESEND_SECONDS):
            signal.pthread_kill(_main or 0, self._number)


def is_from_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal raised an exception."""
    codes = {_code_of(handler) for handler in map(_signal.getsignal, _NUMBERS) if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler written in Python: a function, a method, or an object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def _is_within(frame: FrameType | None, outer: FrameType | None) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _read_handlers() -> None:
    global _handlers, _theirs
    handlers = list(map(_signal.getsignal, _NUMBERS))
    present = zip(_NUMBERS, handlers, strict=True)
    _theirs = {number: handler for number, handler in present if callable(handler)}
    _handlers = handlers  # last, because a handler may raise an exception anywhere here


def _restore_handlers(handlers: dict[int, Handler]) -> None:
    try:
        for number, handler in handlers.items():
            # Unless it is restored already, or a handler has set another one.
            if _signal.getsignal(number) is _note:
                _signal.signal(number, handler)
    except BaseException:  # a handler that was already restored was called, and raised an exception
        _restore_handlers(handlers)
        raise


def _renew() -> None:
    """Reset the state in a forked process, which has one thread and its own signals."""
    global _depth, _main
    _depth, _main = 0, get_ident()
    noted.clear()
    _restore_handlers(_theirs)


os.register_at_fork(after_in_child=_renew)


@atexit.register
def _end_soon() -> None:
    """Skip the last garbage collection when Ctrl-C ends the process.

    It visits all objects of torch and its compiler, which takes half a second of processor time.
    With ten busy processes on two cores, it took 5 to 7 s.
    """
    if issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt):
        gc.freeze()


def check() -> None:
    """Run the handlers of recorded signals. If one raises an exception, the next check runs the
    others.
    """
    while noted and get_ident() == _main:
        number, frame = noted.pop(0)
        handler = _theirs.get(number)
        if handler is not None:
            handler(number, frame)
