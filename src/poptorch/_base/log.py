"""Define the two loggers that users know: their levels, their destination, and how often they
repeat a message.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from . import env, terminal
from .errors import InvalidValue, visible

LEVELS = {
    "TRACE_ALL": logging.DEBUG, "TRACE": logging.DEBUG,
    "DEBUG_IR": logging.DEBUG, "DEBUG": logging.DEBUG,
    "INFO": logging.INFO, "WARN": logging.WARNING,
    "ERR": logging.ERROR, "OFF": logging.CRITICAL,
}  # fmt: skip
LEGACY_LEVELS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}
_PUBLIC = "DEBUG, ERR, INFO, OFF, TRACE, TRACE_ALL, WARN"

python = logging.getLogger("poptorch::python")
engine = logging.getLogger("poptorch:cpp")
bar: Any = None  # the progress bar on the terminal, which makes room for a line
_level = "WARN"


@contextlib.contextmanager
def above_the_progress_bar() -> Iterator[None]:
    shown = bar
    if shown is not None:  # without the bar's lock, which may be locked forever in a forked process
        shown.clear(nolock=True)
    yield
    if shown is not None:
        shown.refresh(nolock=True)


@contextlib.contextmanager
def without_failures_of_fake_tensors() -> Iterator[None]:
    """Drop torch's log of operators that fail without values within the block. The errors are
    handled there, or explained to the user.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


class _Formatter(logging.Formatter):
    def __init__(self, colour: bool) -> None:
        super().__init__("[%(asctime)s.%(msecs)03d] [%(name)s] [%(level)s] %(message)s", "%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        record.level = getattr(record, "finer", record.levelname.lower())
        text = visible(super().format(record))
        if self._colour and record.levelno >= logging.WARNING:
            text = f"\033[33m{text}\033[0m"
        return text


class _CurrentStream(logging.StreamHandler[TextIO]):
    """Writes to the present sys.stderr or sys.stdout, if that can be written to."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    def emit(self, record: logging.LogRecord) -> None:
        with above_the_progress_bar():
            super().emit(record)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return terminal.Stream(self._stream_name)


class _LogFile(logging.FileHandler):
    """Writes to a file. After the first line that cannot be written there, writes to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the library's name)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        instead = _CurrentStream("stderr")
        instead.setFormatter(self.formatter)
        for logger in (python, engine):
            if self in logger.handlers:
                logger.removeHandler(self)
                logger.addHandler(instead)
        _warn_of_file(error)
        instead.handle(record)
        with contextlib.suppress(OSError):  # what could not be written is still in its buffer
            self.close()


def _warn_of_file(error: OSError) -> None:
    python.warning(
        ("The file that POPTORCH_LOG_DEST names cannot be written, so the log of the engine "
         "goes to stderr: %s: %s"),
        env.get("POPTORCH_LOG_DEST"), error.strerror,
    )  # fmt: skip


def setup() -> None:
    terminal.open_closed_descriptors()
    colour = terminal.Stream("stdout").isatty() and terminal.Stream("stderr").isatty()
    destination = env.get("POPTORCH_LOG_DEST")
    for logger, where in ((python, "stderr"), (engine, destination)):
        if not logger.handlers:
            handler: logging.Handler = _CurrentStream("stderr")
            try:
                is_stream = where in ("stderr", "stdout")
                handler = _CurrentStream(where) if is_stream else _LogFile(where, "w")
            except OSError as error:
                _warn_of_file(error)
            handler.setFormatter(_Formatter(colour and where != destination))
            logger.addHandler(handler)
    set_level(env.get("POPTORCH_LOG_LEVEL"))
    for name in env.unknown():
        close = difflib.get_close_matches(name, env.TABLE, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        python.warning("The environment variable %s has no effect here%s", name, hint)


_seen: collections.Counter[str] = collections.Counter()  # engine lines since the last compilation
_most_repeats = 4


def _is_new_enough(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    _seen[message] += 1
    return _seen[message] <= _most_repeats


engine.addFilter(_is_new_enough)


def limit_repeats(limit: int) -> None:
    global _most_repeats
    _most_repeats = limit
    _seen.clear()


def set_level(level: str | int) -> None:
    """Set the verbosity by name, or by one of the integers of old releases.

    Raises:
        InvalidValue: the name or integer is unknown (a ``ValueError``).
    """
    global _level
    if isinstance(level, int):
        if level not in LEGACY_LEVELS:
            raise InvalidValue(
                "Invalid log level integer", got=str(level), fix=f"use one of the names {_PUBLIC}"
            )
        level = LEGACY_LEVELS[level]
    if level not in LEVELS:
        raise InvalidValue(
            f"Unknown log level: {level}", got=repr(level), fix=f"use one of {_PUBLIC}"
        )
    _level = level
    for logger in (python, engine):
        logger.setLevel(LEVELS[level])


def shows(level: str) -> bool:
    order = [*LEVELS]
    return order.index(level) >= order.index(_level)


def progress(shown: bool, message: str, *args: object) -> None:
    """Report what a compilation does: in the log if its level allows that, else next to the
    progress bar.
    """
    if not shown or engine.isEnabledFor(logging.INFO):
        engine.info(message, *args)
    else:
        with above_the_progress_bar():
            terminal.write_line(f"Graph compilation: {message % args}")


def trace(message: str, *args: object) -> None:
    if shows("TRACE"):
        engine.debug(message, *args, extra={"finer": "trace"})  # PopTorch's level, not Python's
