"""What the machine has to spare: memory, and cores with nothing to do."""

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

# New objects before a process that compiles looks for garbage; tracing, importing and lowering make
# millions that stay. The tutorial's CNN takes 6.3 to 6.8 s instead of 7.9 to 8.1 of 700 objects
# (processor time without the C++ compiler's); a ResNet-18 takes 145 MB more.
COLLECTING = 1_000_000
IDLE = 0.6  # cores that have nothing to do: what is started then takes nothing from the run
_SHORTEST = 0.05  # seconds: less says nothing, the system counts in hundredths
_OWN_GROUPS, _CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Limit, use, and the page cache in it, in the files of a control group, version 2 and 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(COLLECTING)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def memory_size() -> int:
    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Return the bytes that programs can still take: the page cache gives way to them."""
    return min([int(psutil.virtual_memory().available), *_left_in_control_groups()])


def own_memory() -> int:
    """Return the bytes that this process has for itself, beside files that others read, too."""
    own = psutil.Process().memory_info()
    return int(own.rss - own.shared)


def _left_in_control_groups() -> Iterator[int]:
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CONTROL_GROUPS / "memory" if controllers else _CONTROL_GROUPS
        own = root / path.lstrip("/")  # in a container often the host's: then the root has files
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
    except OSError:  # another system, or none that may be looked at
        return []


def release_pages(address: int, size: int) -> None:
    """Give back the pages of memory that stays somebody's; whoever writes to it gets new ones."""
    library, page = ctypes.CDLL(None), mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if hasattr(mmap, "MADV_DONTNEED") and first < last:
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def memory_can_be_refused() -> bool:
    """Tell whether asking for memory may fail: by ``ulimit``, or exact accounting of Linux."""
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
        """Return how many cores were idle since the last time; 0 at first, and of one."""
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
