"""What running a program sets for the whole process: the number of threads, and freed memory."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import ParamSpec, TypeVar

import torch

from .._base import env, interrupts, log

P = ParamSpec("P")
R = TypeVar("R")
Numbers = Generator[tuple[int, int], list[float], None]

TRIAL, ROUNDS = 0.25, 2  # seconds of trying, and how often each number is tried at least
CLEAR = 0.8  # what several threads take of one's time where one round of trying is enough
AGAIN = 50  # times as long as it took to try, until it is tried anew: a neighbour may be gone
# Seconds of a call below which several threads are not tried. A perceptron's row whose weights fit
# two cores' caches and not one's takes 0.07 ms with two and 0.17 with one.
SHORT = 5e-5
COLLAPSED, WINDOW = 3, 10  # the median of so many calls is so many times what it was

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h
_KEPT = (1 << 31) - 1  # bytes at most that stay at the heap's end: glibc takes no more


class Threads:
    """Runs the calls of one executable on the process's number of threads, or one.

    Small graphs run best on one; with a busy neighbour so do large ones, whose barriers wait for
    the displaced thread. The shortest calls take one. For others both are tried, and the faster
    stays until calls collapse, or has run for so long that trying anew costs little. Nothing is
    tried where deterministic results are asked for: the number shows in the last bits of sums.

    A handler of a signal may raise anywhere here: the process's number stays as it was.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._user = 0  # the process's number that everything was found for
        self.chosen = 0  # the number of the next call
        self.decision = ""  # in words, with what it comes from

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        user = torch.get_num_threads()
        if user == 1 or torch.are_deterministic_algorithms_enabled():
            self._user, self.decision = 0, ""
            return function(*args, **kwargs)
        if user != self._user:
            self._begin(user)
        start = self._clock()
        result = (alone(function, *args, **kwargs) if self.chosen == 1
                  else function(*args, **kwargs))  # fmt: skip
        self._seconds.append(self._clock() - start)
        if len(self._seconds) >= self._calls:
            self._go_on()
        return result

    def _begin(self, user: int) -> None:
        self.decision, self._numbers = "", self._found(user)
        self.chosen, self._calls = next(self._numbers)
        self._seconds = list[float]()
        self._user = user  # from here on

    def _go_on(self) -> None:
        with interrupts.deferred():
            self.chosen, self._calls = self._numbers.send(self._seconds)
            self._seconds = []

    def _found(self, user: int) -> Numbers:
        """Yield a number of threads and for how many calls; what is sent are their seconds."""
        yield user, 1  # the first call of all pays for caches and says nothing
        while True:
            middle, spent = yield from _tried(user)
            best = min(middle, key=middle.__getitem__)
            self._decide(best, middle)
            ran, recent = 0.0, [0.0]
            while ran < AGAIN * spent and statistics.median(recent) <= COLLAPSED * middle[best]:
                recent = yield best, WINDOW
                ran += sum(recent)

    def _decide(self, best: int, middle: Mapping[int, float]) -> None:
        texts = {n: f"{seconds * 1e3:.2f} ms a call" for n, seconds in middle.items()}
        others = [f", {text} with {_word(n)}" for n, text in texts.items() if n != best]
        before, number = self.decision, f"with {_word(best)} thread{'s' if best > 1 else ''}"
        self.decision = f"{number}: {texts[best]}{''.join(others)}"
        if not before.startswith(number):
            log.engine.info("From the next call on, the program runs %s", self.decision)


def _tried(user: int) -> Generator[tuple[int, int], list[float], tuple[dict[int, float], float]]:
    """Try one thread and ``user`` in turn; return the median seconds of each, and all of them.

    A neighbour slows the larger number down most. So that one is believed at once where it is much
    faster: a call of seconds is not tried for long.
    """
    spent, times = 0.0, dict[int, list[float]]({1: [], user: []})
    while spent < TRIAL or (len(times[user]) < ROUNDS and times[user][0] > CLEAR * times[1][0]):
        for number, seconds in times.items():
            runs = yield number, 1
            if runs[0] < TRIAL:  # the first wakes sleeping threads
                runs += yield number, 1
            seconds.append(min(runs))
            spent += sum(runs)
            if times[1][0] < SHORT:
                return {1: times[1][0]}, spent
    return {number: statistics.median(seconds) for number, seconds in times.items()}, spent


def _word(number: int) -> str:
    return "one" if number == 1 else str(number)


def use_one() -> None:
    torch.set_num_threads(1)
    if (openmp := _openmp()) is not None:
        openmp.omp_set_max_active_levels(0)


def alone(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function while one thread runs this thread's operators.

    Compiled code asks for its own number, unless regions may not nest. Torch's own function also
    sets with how many other threads of the process begin.
    """
    user, openmp = torch.get_num_threads(), _openmp()
    if openmp is None:
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(user)
    levels = openmp.omp_get_max_active_levels()
    try:
        openmp.omp_set_num_threads(1)
        openmp.omp_set_max_active_levels(0)
        return function(*args, **kwargs)
    finally:
        try:
            openmp.omp_set_num_threads(user)
        finally:
            openmp.omp_set_max_active_levels(levels)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "omp_set_max_active_levels") else None


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, for the next step; return whether it does.

    Otherwise the next step gets the same pages one fault at a time: 9.3 ms instead of 5.4 for the
    tutorial's CNN, 8 micro-batches of 16; 92 and 86 for a BERT of 4 layers (processor time). Large
    blocks come from the heap, too: where each is mapped anew, a step of GPT-2 with 124 million
    weights takes 1.25 times as long, and 0.93 of the memory.
    """
    return bool(env.get("POPTORCH_KEEP_FREED_MEMORY")) and _set_thresholds()


def release_freed_memory() -> None:
    """Give back what was kept, when a program goes; others get theirs anew."""
    library = ctypes.CDLL(None)
    if env.get("POPTORCH_KEEP_FREED_MEMORY") and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@functools.cache
def _set_thresholds() -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_TRIM_THRESHOLD, _KEPT) and library.mallopt(_MMAP_MAX, 0))
