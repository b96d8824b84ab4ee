"""Decide with how many threads a program runs: calls are timed with one thread and with several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

import torch

from .._base import interrupts, log
from .._base.process_settings import R, alone
from .._base.resources import is_crowded

A = TypeVar("A")
B = TypeVar("B")
Trials = Generator[tuple[int, int], list[float], None]

# seconds of trying, and the minimum number of trials for each number of threads
TRIAL, ROUNDS = 0.25, 2
# one trial is enough if several threads take at most this share of the time of one thread
CLEAR = 0.8
# trials are repeated after this multiple of their duration, because a busy neighbour may be gone
RETRY_FACTOR = 50
# Calls that are shorter than this number of seconds are not tried with several threads. A row of a
# perceptron whose weights fit the caches of two cores, but not of one, takes 0.07 ms with two
# threads and 0.17 ms with one.
SHORT = 5e-5
# trials are repeated if the median of ``WINDOW`` calls is ``COLLAPSED`` times the earlier time
COLLAPSED, WINDOW = 3, 10
# seconds for which a program may wait with trials while the machine is crowded
PATIENCE = 30.0
LOOK_AGAIN = 0.05  # seconds of calls after which it looks again whether the machine is crowded
_CROWDED = "with one thread, because other processes need the cores"


class Threads:
    """Runs the calls of one executable with the process's number of threads, or with one thread.

    Small graphs run best on one thread. With a busy neighbour, large graphs do so, too, because
    their barriers wait for the displaced thread. The shortest calls use one thread. For other calls
    both numbers are tried, and the faster one stays until calls become much slower, or until the
    program has run for so long that trying again costs little. Nothing is tried if the user asks
    for deterministic results, because the number of threads changes the last bits of sums.

    While other processes need all cores but one, calls use one thread. This is usual at the
    beginning of a run, while another process compiles: with two threads, the first call of an LSTM
    took 5 s in place of 0.8 s.

    A signal handler may raise anywhere here. The process's number of threads then stays as it was.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        crowded: Callable[[], bool] = is_crowded,
    ) -> None:
        self._clock, self._is_crowded = clock, crowded
        self._user = 0  # the process's number of threads for which everything was found out
        self.chosen = 0  # number of threads for the next call
        self.decision = ""  # the decision and its reason, in words

    def run(self, function: Callable[[A, B], R], first: A, second: B) -> R:
        """Call a function with two arguments."""
        user = torch.get_num_threads()
        if user == 1 or torch.are_deterministic_algorithms_enabled():
            self._user, self.decision = 0, ""
            return function(first, second)
        if user != self._user:
            self._begin(user)
        start = self._clock()
        result = (alone(function, first, second) if self.chosen == 1
                  else function(first, second))  # fmt: skip
        self._seconds.append(self._clock() - start)
        if len(self._seconds) >= self._calls:
            self._exchange_seconds()
        return result

    def _begin(self, user: int) -> None:
        self.decision, self._numbers = "", self._found(user)
        self.chosen, self._calls = next(self._numbers)
        self._seconds = list[float]()
        self._user = user  # now the new number is in use

    def _exchange_seconds(self) -> None:
        with interrupts.deferred():
            self.chosen, self._calls = self._numbers.send(self._seconds)
            self._seconds = []

    def _found(self, user: int) -> Trials:
        """Yield a number of threads and of calls; the seconds of these calls are sent back."""
        begin = self._clock()
        # The very first call fills caches, so its time is ignored.
        yield (1 if self._is_crowded() else user), 1
        while True:
            calls = WINDOW
            while self._clock() - begin < PATIENCE and self._is_crowded():
                self.decision = _CROWDED
                seconds = yield 1, calls
                calls = max(WINDOW, int(LOOK_AGAIN / max(statistics.median(seconds), SHORT)))
            middle, spent = yield from _tried(user)
            best = min(middle, key=middle.__getitem__)
            self._decide(best, middle)
            ran, recent = 0.0, [0.0]
            while (
                ran < RETRY_FACTOR * spent and statistics.median(recent) <= COLLAPSED * middle[best]
            ):
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
    """Try one thread and ``user`` threads, alternating. Return the median seconds of each, and all
    times.

    A neighbour slows down the larger number most. If that number is much faster anyway, it is
    chosen immediately, so that a call of several seconds is not tried for long.
    """
    spent, times = 0.0, dict[int, list[float]]({1: [], user: []})
    while spent < TRIAL or (len(times[user]) < ROUNDS and times[user][0] > CLEAR * times[1][0]):
        for number, seconds in times.items():
            runs = yield number, 1
            if runs[0] < TRIAL:  # the first run wakes sleeping threads
                runs += yield number, 1
            seconds.append(min(runs))
            spent += sum(runs)
            if times[1][0] < SHORT:
                return {1: times[1][0]}, spent
    return {number: statistics.median(seconds) for number, seconds in times.items()}, spent


def _word(number: int) -> str:
    return "one" if number == 1 else str(number)
