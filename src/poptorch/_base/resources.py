"""Measure what the machine has available: memory, and cores. Collects garbage rarely while a
model is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

# Number of new objects before the garbage collector runs in a process that compiles. Tracing,
# importing and lowering make millions of objects that stay alive. The tutorial's CNN takes 6.3 to
# 6.8 s instead of 7.9 to 8.1 with 700 objects (processor time without the C++ compiler). A
# ResNet-18 takes 145 MB more memory.
COLLECTING = 1_000_000
IDLE = 0.6  # this number of idle cores is enough to start work without slowing down the run
# seconds; shorter times cannot be measured, because the system counts in hundredths
_SHORTEST = 0.05
_LOAD, _THREADS = Path("/proc/loadavg"), Path("/proc/self/task")
_OWN_GROUPS, _CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Limit, usage, and the page cache in it, in the files of a control group, for versions 2 and 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(COLLECTING)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def memory_size() -> int:
    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Return the bytes that programs can still allocate. The page cache is released for them."""
    return min([int(psutil.virtual_memory().available), *_available_in_control_groups()])


def own_memory() -> int:
    """Return the bytes that only this process uses, without files that others read, too."""
    own = psutil.Process().memory_info()
    return int(own.rss - own.shared)


def _available_in_control_groups() -> Iterator[int]:
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CONTROL_GROUPS / "memory" if controllers else _CONTROL_GROUPS
        # in a container, this often is the host's path, and the files are in the root
        own = root / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.relative_to(root).parts)]):
            for limit, used, cached in _GROUP_FILES:
                most = "".join(_lines(folder / limit))
                if most.isdigit():
                    facts = dict(each.split() for each in _lines(folder / "memory.stat"))
                    taken = sum(map(int, _lines(folder / used))) - int(facts.get(cached, 0))
                    yield max(0, int(most) - taken)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # another system, or the files cannot be read
        return []


def release_pages(address: int, size: int) -> None:
    """Release the pages of memory that stays allocated. Writing to it allocates new pages."""
    library, page = ctypes.CDLL(None), mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if hasattr(mmap, "MADV_DONTNEED") and first < last:
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def memory_can_be_refused() -> bool:
    """Return whether memory allocation may fail, because of ``ulimit`` or strict overcommit
    accounting in Linux.
    """
    unlimited = resource.RLIM_INFINITY
    return (
        _is_exact()
        or resource.getrlimit(resource.RLIMIT_AS)[0] != unlimited
        or resource.getrlimit(resource.RLIMIT_DATA)[0] != unlimited
    )


@functools.cache
def _is_exact() -> bool:
    return "".join(_lines(Path("/proc/sys/vm/overcommit_memory"))) in ("2", "")


class Cores:
    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def idle(self) -> float:
        """Return how many cores were idle since the last call; 0 in the first call or with a single
        core.
        """
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if available == 1:
            return 0.0
        now, times = time.perf_counter(), psutil.cpu_times()
        idle: float = times.idle + getattr(times, "iowait", 0.0)
        before, idle_before = self._last or (now, idle)
        if self._last is not None and now - before < _SHORTEST:
            return 0.0
        self._last = now, idle
        share = (idle - idle_before) / max(now - before, _SHORTEST) / (os.cpu_count() or 1)
        return share * available


def is_crowded() -> bool:
    """Return whether threads of other processes are running on all cores but one, or on all.

    A parallel region then takes milliseconds instead of microseconds, because one of its threads
    waits until the system gives it a core.
    """
    counts = "".join(_lines(_LOAD)).split()  # load, load, load, running/all, last
    if len(counts) < 4:
        return False
    own = sum(_is_running(thread) for thread in _THREADS.glob("*/stat"))
    others = int(counts[3].partition("/")[0]) - own
    cores = os.cpu_count() or 1
    return 1 < cores <= others + 1


def _is_running(thread: Path) -> bool:
    """Return whether a thread, given by its file in /proc, has a core or waits for one."""
    # the name of a thread, which is in parentheses, may contain blanks
    return "".join(_lines(thread)).rpartition(")")[2].split()[:1] == ["R"]
