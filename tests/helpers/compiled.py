"""Compiled tests run compiled code: where compiling fails, the library's interpreter steps in.

Results are then right and only a warning tells, so that a test which compares numbers would pass
without having run what it is about. ``conftest`` asks after each test.
"""

import functools
import logging

_ENGINE = logging.getLogger("poptorch:cpp")
_failures: list[str] = []


def watch() -> None:
    """Note such warnings of this process from now on, regardless of the log level."""
    warn = _ENGINE.warning

    @functools.wraps(warn)
    def noting(message: object, *arguments: object, **settings: object) -> None:
        note_failures_in(str(message) % arguments if arguments else str(message))
        warn(message, *arguments, **settings)  # type: ignore[arg-type]

    _ENGINE.warning = noting  # type: ignore[method-assign]


def note_failures_in(printed: str) -> None:
    """Note such warnings in what another process printed."""
    _failures.extend(line for line in printed.splitlines() if "Compilation failed" in line)


def failures() -> list[str]:
    """Return what was noted since this was last asked."""
    noted = _failures[:]
    _failures.clear()
    return noted
