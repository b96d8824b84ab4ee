"""A schedule in the making: actions are put into the earliest column that is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .._ir.schedule import Action, Schedule, Workload, padded


class Grid:
    """Rows that grow to the right."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._rows: dict[int, list[Action | None]] = {chip: [] for chip in workload.chips}
        self._column: dict[Action, int] = {}

    @property
    def columns(self) -> int:
        """Columns so far."""
        return max(map(len, self._rows.values()))

    def put(self, action: Action, earliest: int = 0) -> int:
        """Append an action to its chip's row, not before a column; return the column it got."""
        row = self._rows[self._workload.chip_of(action.stage_pass)]
        row += [None] * (earliest - len(row))
        row.append(action)
        self._column[action] = len(row) - 1
        return len(row) - 1

    def after(self, actions: Iterable[Action]) -> int:
        """Return the first column after some actions that are in the grid."""
        return max((self._column[action] + 1 for action in actions), default=0)

    def put_update(self) -> None:
        """Append the update, every round after all that was there before it."""
        for _, members in itertools.groupby(self._workload.updates, lambda each: each.round):
            start = self.columns
            for stage_pass in members:
                for action in self._workload.with_traffic(stage_pass):
                    self.put(action, start)

    def schedule(self) -> Schedule:
        """Return what has been put."""
        return Schedule(padded(self._rows))
