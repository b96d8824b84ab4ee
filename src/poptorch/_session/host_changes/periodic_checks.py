"""Decide before each call which checks for changes on the host are made now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from ..._base import interrupts
from ..._residency import unwatched
from .change_check import ChangeCheck, warn_of_changes

CHECK_EVERY, CHEAP = 0.02, 2e-4
"""Seconds between two checks, and seconds that a check may take. A slower check
delays the next one in proportion.
"""
PARTS = 4
"""The number of calls over which a check is spread. The layers are not in the processor's caches
when a call begins: checking a small ResNet takes 0.07 ms in a loop, and 0.25 ms if its inference,
which takes 0.7 ms, is called every 20 ms.
"""
SHARE = 0.001
"""One call checks everything if this takes no more than this share of the time since the last call.
"""
FIRST = 20
"""The number of calls that are always checked, because scripts often edit weights after a
call or two.
"""


class OptimizerChecks(Protocol):
    """The checks of an optimizer. Every call makes the first one, which compares only
    hyper-parameters.
    """

    checks: list[ChangeCheck]


class PeriodicChecks:
    """Makes all checks from time to time, and immediately if the weights were accessed."""

    def __init__(self, weights: ChangeCheck) -> None:
        self._weights = weights
        self.due = 0.0
        self._cost = 0.0  # seconds that the last check of everything took
        self._calls, self._latest, self._part = 0, 0.0, 0

    def adopted(self) -> None:
        """Record that the device has copies of the host's present weights."""
        self._weights.accept()
        self.due = 0.0

    def run(self, checks: Iterable[ChangeCheck], optimizer: OptimizerChecks | None) -> None:
        """Check before a call. The optimizer's numbers are checked in every call.

        A call checks a part of the rest if it is time to, and everything if this takes only a small
        part of the time since the last call.
        """
        moment = time.monotonic()
        is_whole = self._cost < (moment - self._latest) * SHARE
        if optimizer is not None:
            numbers = optimizer.checks[0]
            is_whole = is_whole or not (numbers.reported or numbers.holds())
        self._latest = moment
        if is_whole or moment >= self.due:
            self._check(moment, checks, optimizer, is_whole or not self.due)

    def _check(
        self,
        moment: float,
        checks: Iterable[ChangeCheck],
        optimizer: OptimizerChecks | None,
        is_whole: bool,
    ) -> None:
        every = [*checks, self._weights, *(optimizer.checks if optimizer else ())]
        self._calls, self._part = self._calls + 1, (self._part + 1) % PARTS
        with interrupts.deferred():  # an exception from a signal handler is not a change
            unwatched(warn_of_changes, every if is_whole else every[self._part :: PARTS])
        cost = time.monotonic() - moment
        self._cost = cost if is_whole else self._cost
        self.due = 0.0
        if self._calls >= FIRST:
            self.due = moment + CHECK_EVERY * max(1.0, cost / CHEAP)
