"""Which process this is, and whether another one still lives."""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, told apart from later ones that get the same number.

    Attributes:
        pid: its number.
        started: when it started, in ticks since the machine did; None where that is not known.
        command: what it runs.
        user: who runs it.
    """

    pid: int
    started: int | None
    command: str
    user: str

    @staticmethod
    def current() -> Process:
        """Return this process."""
        pid = os.getpid()
        return Process(pid, _started(pid), Path(sys.executable or "python").name, _user())

    @property
    def lives(self) -> bool:
        """Whether it still runs; one that has died but was not waited for does not."""
        if sys.platform == "linux":
            return _started(self.pid) == self.started is not None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it lives, and belongs to somebody else
            return True
        return True


def _started(pid: int) -> int | None:
    """Ticks at which a running process started; None if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    state, ticks = fields[0], int(fields[19])
    return None if state in "ZX" else ticks


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        return str(os.getuid())
