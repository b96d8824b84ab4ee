"""What a process may leave behind: other processes, file descriptors, shared memory. For tests."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.patience import HANGS, eventually
from poptorch._compile import compiler_processes

# Python's own helpers, which serve the whole program and end with it.
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def _stat(pid: int) -> tuple[int, str] | None:
    """(parent, start time) of a process, or None; an ended orphan that still waits is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] == "Z" and fields[1] == "1":
        return None
    return int(fields[1]), fields[19]


def _is_helper(pid: int, parent: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    ours = parent == os.getpid() and "program_server" in command  # what it forks has that name, too
    return ours or any(helper in command for helper in _HELPERS)


def descendants(root: int | None = None) -> dict[int, str]:
    """Return {pid: start time} of all processes below one, less Python's helpers."""
    top = os.getpid() if root is None else root
    stats = {int(p): s for p in os.listdir("/proc") if p.isdigit() if (s := _stat(int(p)))}
    below, found = {top}, {}
    while below:
        below = {pid for pid, (parent, _) in stats.items() if parent in below}
        found.update({pid: stats[pid][1] for pid in below})
    return {
        pid: start
        for pid, start in found.items()
        if not (stats[pid][0] == top and _is_helper(pid, top))
    }


def end_kept_compiler() -> None:
    """End the process that is kept for compiling the next program, if there is one.

    It ends by itself after some idle minutes, and is then counted as a zombie.
    """
    compiler_processes.end_kept()


def still_there(processes: dict[int, str]) -> list[int]:
    """Return which of these processes exist, including zombies and orphans."""
    return [pid for pid, start in processes.items() if (s := _stat(pid)) and s[1] == start]


def descriptors() -> dict[str, str]:
    """Return {descriptor: what it refers to} of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def mappings() -> list[str]:
    """Return the rings and data sets that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:poptorch" in line]


def segments(pids: set[int]) -> set[str]:
    """Return the names in /dev/shm that processes made whose numbers they carry."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if pids & {int(p) for p in name.split("_") if p.isdigit()}}


@contextlib.contextmanager
def nothing_left(seconds: float = HANGS) -> Iterator[Any]:
    """Assert that the block soon leaves nothing, nor processes that it puts in the yielded dict."""
    gc.collect()
    before, files, maps = descendants(), set(descriptors().items()), len(mappings())
    known: dict[int, str] = {}
    yield known

    def left() -> dict[str, list]:
        remains = {
            "processes": still_there(known) + [p for p in descendants() if p not in before],
            "descriptors": sorted(set(descriptors().items()) - files),
            "mappings": mappings()[maps:],
            "segments": sorted(segments({os.getpid(), *known})),
        }
        if any(remains.values()):
            gc.collect()  # cycles may keep it; the next check shows whether they did
        return remains

    # To look takes milliseconds, which those who are to end need, too.
    gone = eventually(lambda: not any(left().values()), seconds, pause=0.02)
    assert gone, f"left behind: {left()}"
