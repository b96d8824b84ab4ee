"""Decide what happens if compiled code fails while it runs: the interpreter repeats this call, and
runs all later ones.

Compiled code writes weights and optimizer state in place. All sizes are fixed, so an error in the
code shows when it first runs. Therefore the first calls keep a copy of everything that the program
changes, if memory allows, and later calls cost nothing. ``backends/rollback.py`` decides what later
calls keep, and says whether a failed call has left everything as it was. Only then is the call
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._base import log
from .._base.errors import Error, OperatorError, described
from .._base.resources import available_memory
from .._ir.plan import Plan, Report
from .._ir.program import State
from ..backends import Compiled, Executable
from ..backends.failing import is_users, refused_memory
from ..backends.protocol import Failure, failure_of, finder_of_shortcuts
from ..backends.rollback import Snapshot

FIRST = 2
"""The number of calls of new code that keep a copy. Every kernel runs in the first, and the second
is the first to read prepared weights, as all later calls do.
"""

_SHARE = 0.5  # share of the free memory that the copy may use


class WithFallback:
    """Runs ``fast`` until one of its calls fails that ``slow`` can make, and runs ``slow`` from
    then on.
    """

    def __init__(self, fast: Executable, slow: Callable[[], Executable], plan: Plan) -> None:
        self._current, self._slow = fast, slow
        self._left = FIRST
        self._snapshot: Snapshot | None = Snapshot(plan.program)
        self.gave_up = False
        # the shortcut of the fast executable, after the calls that keep a copy
        self.shortcut: Callable[[State], Compiled | None] | None = None

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._snapshot is not None and not self._fits(self._snapshot, state, batch):
            self._keep_no_copy()
        if self._snapshot is not None:
            return self._first(self._snapshot, state, batch)
        try:
            return self._current.run(state, batch)
        except Exception as error:
            failure = self._failure(error)
            if failure is None or not failure.undone:
                raise
            return self._instead(error, state, batch)

    def _keep_no_copy(self) -> None:
        self._snapshot = None
        self.shortcut = finder_of_shortcuts(self._current)

    @staticmethod
    def _fits(snapshot: Snapshot, state: State, batch: Sequence[torch.Tensor]) -> bool:
        needed, free = snapshot.size(state, batch), available_memory()
        fits = needed <= _SHARE * free
        if not fits:
            log.engine.info(
                "The first calls of compiled code keep no copy of the state, which would take "
                "%d MiB; %d MiB are free",
                needed >> 20,
                free >> 20,
            )
        return fits

    def _first(
        self, snapshot: Snapshot, state: State, batch: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        snapshot.keep(state, batch)
        try:
            results = self._current.run(state, batch)
        except Exception as error:
            failure = self._failure(error)
            if failure is None:
                raise
            snapshot.restore(state, batch)
            return self._instead(error, state, batch)
        self._left -= 1
        if not self._left:
            self._keep_no_copy()
        return results

    def report(self) -> Report:
        return self._current.report()

    def _failure(self, error: Exception) -> Failure | None:
        """Return the failure, if the code may have caused it and the call can be repeated.

        After an exchange, other processes have continued, and would not take part in another
        exchange.
        """
        ours = isinstance(error, Error) and not isinstance(error, OperatorError)
        if self.gave_up or ours or is_users(error) or refused_memory(error):
            return None
        failure = failure_of(self._current)
        return None if failure is None or failure.exchanged else failure

    def _instead(
        self, error: Exception, state: State, batch: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        slow = self._slow()
        try:
            results = slow.run(state, batch)
        except Exception as repeated_error:  # then the code is not the cause
            raise repeated_error from None
        self._current, self._snapshot, self.shortcut, self.gave_up = slow, None, None, True
        cause = error.__cause__ if isinstance(error, OperatorError) else None
        warn_of_failure(described(cause if isinstance(cause, Exception) else error))
        return results


def warn_of_failure(why: str) -> None:
    log.engine.warning("Compilation failed. The run continues without compiled code: %s", why)
