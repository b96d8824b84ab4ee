"""Kill the remaining processes of a launcher that has ended: ``python reaper.py LAUNCHER FOLDER``.

The program waits until its standard input ends. Only the launcher has the other end, so the program
also notices ``kill -9``. Then it asks each process with the launcher's id in its environment to
end, and kills it if it does not: instances, their workers and compilers, and other launchers. It
imports only the standard library, because it waits in memory as long as the job runs.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

VARIABLE = "POPRUN_LAUNCHER"
_PATIENCE = 5.0  # seconds between asking processes to end and killing them
_PAUSE = 0.05


def found(launcher: str) -> list[int]:
    """Return the ids of this user's processes that a launcher started directly or indirectly."""
    mark, ids = f"{VARIABLE}={launcher}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process belongs to another user or has ended
            if mark in path.read_bytes().split(b"\0"):
                ids.append(int(path.parent.name))
    return ids


def end(launcher: str) -> None:
    signalled, until = set[int](), time.monotonic() + _PATIENCE
    # repeat, because processes may start others in the meantime
    while processes := found(launcher):
        late = time.monotonic() > until
        for process in processes:
            if late or process not in signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        signalled.update(processes)
        time.sleep(_PAUSE)


def main(launcher: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # signals are for the launcher; this process ends when the launcher does
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(launcher)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
