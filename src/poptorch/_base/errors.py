"""Define errors with four parts (title, got, where, fix) and how they are printed. If PopTorch
raised a builtin exception, the error is also an instance of it.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from typing import Any

from . import source

LONG_MESSAGES, MAX_LINES = "poptorch_error-", 80
PYTHON_ERROR = "poptorch_py_error"
_MORE = " " * 10  # indentation of the second and later lines of a part
_SHOWN_LINES = 8  # number of these lines in a message that is shortened
_CONTROL = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# surrogate characters: files cannot contain a single one, but JSON can
_HALVES = range(0xD800, 0xE000)
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in {*_CONTROL, *_HALVES} - {*b"\t\n"}}


def visible(text: str) -> str:
    """Escape characters that move a terminal's cursor or hide text, which names in files
    may contain.
    """
    return text.translate(_ESCAPED)


def one_line(text: str) -> str:
    """Also escape line ends and tabs, so that a name stays in its place in a table or a list."""
    return visible(text).replace("\t", "\\t").replace("\n", "\\n")


class Error(Exception):
    """Any error of the library, in compilation or while a program runs.

    Attributes:
        type: which layer failed, for instance ``"poptorch_py_error"``.
        message: what happened, without the context stack.
        location: a multi-line context stack, one frame per line; empty for Python-side errors.
    """

    __module__ = "poptorch"
    of_batch = False  # whether the batch of a call is unlike the batches that were compiled for

    def __init__(
        self,
        title: str,
        *,
        got: str | None = None,
        where: str | None = None,
        fix: str | tuple[str, ...] | None = None,
        type: str = PYTHON_ERROR,
        location: str = "",
    ) -> None:
        self.type = type
        if where is None and not location:
            where = _users_line()
        self.message = _shortened(visible(composed(title, got, where, fix)))
        self.location = location
        super().__init__(title)

    def __init_subclass__(cls) -> None:
        # tracebacks then show the name that users import
        if cls.__module__.startswith("poptorch."):
            cls.__module__ = "poptorch"

    def __str__(self) -> str:
        text = f"'{self.type}': {self.message}"
        action = getattr(self, "recovery_action", None)
        if action:
            text += f"\nRecovery action required: {action}"
        return f"{text}\nError raised in:\n{self.location}" if self.location else text

    def __reduce__(self) -> Any:
        name = type(self).__name__
        return _rebuild, (name, self.__dict__.copy(), self.args)


def described(error: Exception) -> str:
    return error.message if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _users_line() -> str | None:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return None if source.is_user_file(frame.f_code.co_filename) else source.calling_line()


def _rebuild(name: str, attributes: dict[str, Any], args: tuple[Any, ...]) -> Error:
    cls: type[Error] = globals().get(name, Error)
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(attributes)
    return error


def composed(
    title: str, got: str | None, where: str | None, fix: str | tuple[str, ...] | None
) -> str:
    lines = [title]
    fixes = (fix,) if isinstance(fix, str) else fix or ()
    parts = [("Got:", got), ("Where:", where), *(("Fix:", text) for text in fixes)]
    for label, text in parts:
        if text:
            first, *rest = text.splitlines()
            lines.append(f"  {label:<7} {first}")
            lines.extend(_MORE + line for line in rest)
    return "\n".join(lines)


def _shortened(message: str) -> str:
    if message.count("\n") < MAX_LINES:
        return message
    try:
        path = _written(message)
    except OSError:  # there is no place to write to, and the whole text is better than a part of it
        return message
    kept: list[str] = []
    run = 0
    for line in message.splitlines():
        run = run + 1 if line.startswith(_MORE) else 0
        if run < _SHOWN_LINES:
            kept.append(line)
        elif run == _SHOWN_LINES:
            kept.append(_MORE + "...")
    return "\n".join([*kept[:MAX_LINES], f"See {path} for details"])


@functools.lru_cache(maxsize=16)  # a loop may raise the same error again and again
def _written(message: str) -> str:
    """Write a message to a file that nobody else can read or replace by a link. Return the file."""
    handle, path = tempfile.mkstemp(prefix=LONG_MESSAGES, suffix=".log")
    with os.fdopen(handle, "w") as file:
        file.write(message + "\n")
    return path


class RecoverableError(Error):
    """A device failure that a reset can fix. ``recovery_action`` names the reset."""

    def __init__(self, title: str, *, recovery_action: str = "", **parts: Any) -> None:
        super().__init__(title, **parts)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A device failure that needs maintenance."""


class AssertionFailure(Error, AssertionError):  # noqa: N818 (the builtin is AssertionError)
    """A rule of use was violated where PopTorch asserted (argument binding, option types)."""


class OperatorError(Error, RuntimeError):
    """An operator of a program failed where PyTorch raises RuntimeError."""


class OperatorIndexError(OperatorError, IndexError):
    """An operator of a program refused an index where PyTorch raises IndexError."""


class StateError(Error, RuntimeError):
    """The state of the objects does not allow the request, where PopTorch raised RuntimeError."""


class InvalidValue(Error, ValueError):  # noqa: N818 (the builtin's own name is ValueError)
    """A value is outside the accepted set, where PopTorch raised ValueError."""


class InvalidType(Error, TypeError):  # noqa: N818 (the builtin's own name is TypeError)
    """An object has the wrong type, where PopTorch raised TypeError."""


class InvalidAttribute(Error, AttributeError):  # noqa: N818 (the builtin is AttributeError)
    """An attribute is unknown or frozen, where PopTorch raised AttributeError."""


class Unsupported(Error, NotImplementedError):  # noqa: N818 (the builtin's own name is longer)
    """Something is not supported, where PopTorch raised NotImplementedError."""


class InvalidKey(Error, KeyError):  # noqa: N818 (the builtin's own name is KeyError)
    """A name is outside the accepted set, where PopTorch raised KeyError."""
