"""Finding the user's own line: the first frame that is neither ours nor torch's."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OURS = str(Path(__file__).resolve().parent.parent)
DEFAULT_EXCLUDES = (OURS, "site-packages/torch", "site-packages/poptorch", "lib/python3")


def is_user_file(filename: str, excludes: Iterable[str] = DEFAULT_EXCLUDES) -> bool:
    """Tell whether a file belongs to the user rather than to this library, torch or Python."""
    return not filename.startswith("<") and not any(part in filename for part in excludes)


def describe(filename: str, line: int | None) -> str:
    """Return ``file.py:41, the code of that line``."""
    code = textwrap.shorten(linecache.getline(filename, line or 0), 100, placeholder=" ...")
    place = f"{Path(filename).name}:{line}"
    return f"{place}, {code}" if code else place


def calling_line() -> str | None:
    """Return the innermost user line on the present call stack, described, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return describe(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raising_line(error: BaseException) -> str | None:
    """Return the innermost user line of an exception's traceback, described, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return describe(frame.filename, frame.lineno)
    return None


def definition_line(function: Callable[..., Any]) -> str | None:
    """Return where a function is defined, described, or None for builtins."""
    try:
        _, line = inspect.getsourcelines(function)
        return describe(inspect.getsourcefile(function) or "", line)
    except (OSError, TypeError):
        return None


def innermost_user_line(stack_trace: str | None) -> tuple[str, int] | None:
    """Return (file, line) of the innermost user frame in a formatted stack trace, or None."""
    found = None
    for text in (stack_trace or "").splitlines():
        part = text.strip()
        if part.startswith('File "') and '", line ' in part:
            filename, rest = part[6:].split('", line ', 1)
            if is_user_file(filename):
                found = filename, int(rest.split(",")[0])
    return found
