"""Find the user's own line: the first stack frame that belongs neither to this library nor
to torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .thread_safety import holding

OURS = str(Path(__file__).resolve().parent.parent)
_LONGEST = 100  # characters of a line that are shown
_PACKAGES = ("/site-packages/", "/dist-packages/")
_FRAME = re.compile(r'^ *File "(.*?)", line (\d+)', re.M)
_DEFINES = ("def ", "async def ", "class ")  # decorators precede it
DEFAULT_EXCLUDES = (OURS, "site-packages/torch", "site-packages/poptorch", "lib/python3")


_more: ContextVar[tuple[str, ...]] = ContextVar("excluded files", default=())


def excluding(parts: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    return holding(_more, tuple(parts))


def is_user_file(filename: str) -> bool:
    return _is_user_file(filename, _more.get())


@functools.lru_cache(1024)  # the frames of a stack belong to few files
def _is_user_file(filename: str, more: tuple[str, ...]) -> bool:
    excludes = (*DEFAULT_EXCLUDES, *more)
    return not filename.startswith("<") and not any(part in filename for part in excludes)


def is_own_file(filename: str) -> bool:
    """Return whether a file belongs to the user and not to an installed package."""
    return is_user_file(filename) and _in_package(filename) is None


def is_model_file(filename: str) -> bool:
    """Return whether a file may contain a model: it belongs to the user, or to another package than
    torch.
    """
    return is_user_file(filename) or _in_package(filename) is not None


def _in_package(filename: str) -> str | None:
    for folder in _PACKAGES:
        _, is_below, inside = filename.rpartition(folder)
        if is_below and not filename.startswith(OURS):
            return None if inside.startswith(("torch/", "poptorch/")) else inside
    return None


def describe(filename: str, line: int | None) -> str:
    """Return ``file.py:41, the code of that line``; ``package/file.py:41`` in a package."""
    code = _shortened(" ".join(linecache.getline(filename, line or 0).split()))
    place = f"{_in_package(filename) or Path(filename).name}:{line}"
    return f"{place}, {code}" if code else place


def _shortened(code: str) -> str:
    """Shorten a long line between words, or within a word if most of the line would be lost."""
    short = textwrap.shorten(code, _LONGEST, placeholder=" ...")
    if len(code) > _LONGEST and len(short) < _LONGEST // 2:
        return code[: _LONGEST - 4] + " ..."
    return short


def calling_line(below: int = 0) -> str | None:
    """Return the user's line that is running; ``below``: leave out this many outermost frames."""
    stack = [*traceback.walk_stack(sys._getframe(1))]
    inner = stack[: len(stack) - below]
    return _innermost((frame.f_code.co_filename, line) for frame, line in inner)


def stack_depth() -> int:
    """Return the number of frames below the caller's, and its own."""
    return sum(1 for _ in traceback.walk_stack(sys._getframe(1)))


def _innermost(places: Iterable[tuple[str, int | None]]) -> str | None:
    inside = None
    for filename, line in places:
        if is_user_file(filename):
            place = describe(filename, line)
            return f"{place} (in {inside})" if inside else place
        if inside is None and _in_package(filename) is not None:
            inside = describe(filename, line)
    return inside


def raising_line(error: BaseException) -> str | None:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _innermost((frame.filename, frame.lineno) for frame in frames)


def definition_line(function: Callable[..., Any]) -> str | None:
    function = inspect.unwrap(function)
    try:
        lines, first = inspect.getsourcelines(function)
        starts = (at for at, text in enumerate(lines) if text.lstrip().startswith(_DEFINES))
        return describe(inspect.getsourcefile(function) or "", first + next(starts, 0))
    except (OSError, TypeError):
        return None


def innermost_user_line(stack_trace: str | None) -> tuple[str, int] | None:
    innermost = None
    for filename, line in _FRAME.findall(stack_trace or ""):
        if is_user_file(filename):
            innermost = filename, int(line)
    return innermost
