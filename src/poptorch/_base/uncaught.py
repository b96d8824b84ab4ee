"""Exceptions that nobody caught, through the logger: what happened first, then the traceback.

Source: PopTorch user guide, "Environment variables".
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from types import TracebackType

from . import log


def setup() -> None:
    """Report uncaught exceptions, unless another library reports them already."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Log an exception at the critical level; an interrupt looks as in any Python program."""
    if not issubclass(kind, Exception):
        sys.__excepthook__(kind, error, where)
        return
    message = "".join(traceback.format_exception_only(kind, error)).rstrip()
    trace = "".join(traceback.format_exception(kind, error, where)).rstrip()
    if isinstance(error, subprocess.CalledProcessError):
        trace += "".join(f"\n{_text(part)}" for part in (error.stdout, error.stderr) if part)
    log.python.critical("%s\n%s", message, trace)


def _text(output: str | bytes) -> str:
    return output if isinstance(output, str) else output.decode(errors="replace")
