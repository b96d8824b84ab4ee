"""What running a program sets for the whole process: the number of threads, and freed memory."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Generator

import torch

from .._base import env, log

TRIAL, ROUNDS = 0.5, 2  # seconds of trying, and how often each number is tried at least
# Seconds of a call for which several threads do not pay: two take 0.7 of a perceptron's time at
# 0.35 ms a call, 0.8 at 0.22, all of it at 0.17; many times it, once they had gone to sleep.
SHORT = 2e-4
COLLAPSED, WINDOW = 3, 10  # the median of so many calls is so many times what it was

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEPT = 256 << 20  # bytes at most that stay although nothing uses them
_LARGEST = 32 << 20  # bytes of one block: the most that glibc takes


class Threads:
    """A context for each call of one executable: the process's number of threads, or one.

    Small graphs run best on one; with a busy neighbour so do large ones, whose barriers wait for
    the displaced thread. The shortest calls take one. For others both are tried, and the faster
    stays; several are given up for good when calls collapse. Nothing is tried where deterministic
    results are asked for, as the number shows in the last bits of sums.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._user = 0  # the process's number that everything was found for
        self.chosen = 0  # the number of the next call
        self.decision = ""  # in words, with what it comes from

    def __enter__(self) -> None:
        user = torch.get_num_threads()
        self._active = user > 1 and not torch.are_deterministic_algorithms_enabled()
        if not self._active:
            self._user, self.decision = 0, ""
            return
        if user != self._user:
            self._user, self.decision, self._numbers = user, "", self._found(user)
            self.chosen = next(self._numbers)
        if self.chosen == 1:
            self._levels = limit(1)
        self._start = self._clock()

    def __exit__(self, *_: object) -> None:
        if not self._active:
            return
        seconds = self._clock() - self._start
        if self.chosen == 1:
            limit(self._user, self._levels)
        self.chosen = self._numbers.send(seconds)

    def _found(self, user: int) -> Generator[int, float, None]:
        """Yield each call's number of threads; what is sent is the seconds that it took."""
        spent, times = 0.0, dict[int, list[float]]({1: [], user: []})
        yield user  # the first call of all pays for caches and says nothing
        while spent < TRIAL or len(times[user]) < ROUNDS:
            for number, seconds in times.items():
                first, second = (yield number), (yield number)  # the first wakes sleeping threads
                seconds.append(min(first, second))
                spent += first + second
                if times[1][0] < SHORT:
                    self._decide(f"with one thread: {times[1][0] * 1e3:.2f} ms a call")
                    while True:
                        yield 1
        middle = {number: statistics.median(seconds) for number, seconds in times.items()}
        one, several = (f"{middle[number] * 1e3:.2f} ms a call" for number in (1, user))
        if middle[user] < middle[1]:
            self._decide(f"with {user} threads: {several}, {one} with one")
            recent = [0.0]
            while statistics.median(recent) <= COLLAPSED * middle[user]:
                recent = []
                for _ in range(WINDOW):
                    recent.append((yield user))
            several = f"{statistics.median(recent) * 1e3:.2f} ms a call"
        self._decide(f"with one thread: {one}, {several} with {user}")
        while True:
            yield 1

    def _decide(self, decision: str) -> None:
        self.decision = decision
        log.engine.info("From the next call on the program runs %s", decision)


def use_one() -> None:
    torch.set_num_threads(1)
    limit(1)


def limit(number: int, levels: int | None = None) -> int | None:
    """Set how many threads run this thread's operators; return the nesting allowed before.

    Compiled code asks for its own number, unless regions may not nest. Torch's own function also
    sets with how many other threads of the process begin.
    """
    openmp = _openmp()
    if openmp is None:
        torch.set_num_threads(number)
        return None
    openmp.omp_set_num_threads(number)
    before: int = openmp.omp_get_max_active_levels()
    if number == 1 or levels is not None:
        openmp.omp_set_max_active_levels(0 if levels is None else levels)
    return before


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "omp_set_max_active_levels") else None


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, for the next step; return whether it does.

    Otherwise the next step gets the same pages one fault at a time: 9.3 ms instead of 5.4 for the
    tutorial's CNN, 8 micro-batches of 16; 92 and 86 for a BERT of 4 layers (processor time).
    """
    return bool(env.get("POPTORCH_KEEP_FREED_MEMORY")) and _set_thresholds()


@functools.cache
def _set_thresholds() -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    kept = library.mallopt(_TRIM_THRESHOLD, KEPT) and library.mallopt(_MMAP_THRESHOLD, _LARGEST)
    return bool(kept)
