"""Ends what is left of a launcher that has ended: ``python reaper.py LAUNCHER FOLDER``.

It waits for the end of its input, whose other end only the launcher has, so that ``kill -9`` is
noticed, too. Then each process that has the launcher's id in its environment is asked to end, and
ended, wherever it has gone: instances, their workers and compilers, launchers among them. It
imports nothing but what Python brings, as it waits for a whole job.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

VARIABLE = "POPRUN_LAUNCHER"
_PATIENCE = 5.0  # seconds from asking processes to end to ending them
_PAUSE = 0.05


def found(launcher: str) -> list[int]:
    """Return the ids of this user's processes that a launcher has started, and theirs."""
    mark, ids = f"{VARIABLE}={launcher}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark in path.read_bytes().split(b"\0"):
                ids.append(int(path.parent.name))
    return ids


def end(launcher: str) -> None:
    asked, until = set[int](), time.monotonic() + _PATIENCE
    while processes := found(launcher):  # again and again: they may start others meanwhile
        late = time.monotonic() > until
        for process in processes:
            if late or process not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(processes)
        time.sleep(_PAUSE)


def main(launcher: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher, which says how it ends
    sys.stdin.buffer.read()
    end(launcher)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
