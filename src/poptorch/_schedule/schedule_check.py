"""Check a schedule: each action is on the right chip, nothing is missing or repeated, and the order
is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._ir.block_labels import StagePass
from .._ir.schedule import Action, Schedule, Traffic, Workload


class ScheduleError(AssertionError):
    """The schedule is wrong. The text shows the grid with the wrong cell marked."""

    def __init__(self, schedule: Schedule, reason: str, cell: tuple[int, int] | None) -> None:
        self.reason = reason
        self.cell = cell  # (chip, column); None if something is missing altogether
        where = f" at chip {cell[0]}, column {cell[1]}" if cell else ""
        super().__init__(f"{reason}{where}\n{schedule.grid(cell)}")


def check(schedule: Schedule, workload: Workload) -> None:
    """Check that every action is done once, on its chip, and after everything that it needs."""
    if sorted(schedule.rows) != workload.chips:
        chips = ", ".join(map(str, workload.chips))
        raise ScheduleError(schedule, f"there must be one row for each of the chips {chips}", None)
    for chip, row in schedule.rows.items():
        if len(row) != schedule.columns:
            raise ScheduleError(schedule, "all rows must have one length", (chip, len(row)))
    expected = set(workload.actions())
    column: dict[Action, int] = {}
    for at, chip, action in schedule.cells():
        cell = (chip, at)
        if action not in expected:
            raise ScheduleError(schedule, f"{action} is not part of the workload", cell)
        if action in column:
            raise ScheduleError(schedule, f"{action} is done twice", cell)
        home = workload.chip_of(action.stage_pass)
        if chip != home:
            raise ScheduleError(schedule, f"{action} belongs on chip {home}", cell)
        for needed in _needs(action, workload):
            if needed in expected and column.get(needed, at) >= at:
                raise ScheduleError(schedule, f"{action} comes before {needed}", cell)
        column[action] = at
    for action in workload.actions():
        if action not in column:
            raise ScheduleError(schedule, f"{action} is missing", None)


def _needs(action: Action, workload: Workload) -> Iterator[Action]:
    stage_pass, micro_batch = action.stage_pass, action.micro_batch
    if action.traffic is Traffic.STORE:
        yield Action(stage_pass, micro_batch)
        return
    if action.traffic is Traffic.LOAD:
        yield from _before_load(stage_pass, micro_batch, workload)
        return
    yield Action(stage_pass, micro_batch, Traffic.LOAD)
    if micro_batch:
        yield Action(stage_pass, micro_batch - 1)
    if stage_pass.is_update:
        yield from _before_update(stage_pass, workload)
        return
    for needed in workload.needs.get(stage_pass, ()):
        yield Action(needed, micro_batch)


def _before_load(loading: StagePass, micro_batch: int, workload: Workload) -> Iterator[Action]:
    """Check that what an action loads was stored before, for this micro-batch or for all
    earlier ones.
    """
    for storing in workload.fetches.get(loading, ()):
        # a pass that comes later in this cycle stored it for the previous micro-batch
        if not loading.is_update:
            at = micro_batch if storing < loading else micro_batch - 1
        else:
            at = 0 if storing.is_update else workload.micro_batches - 1
        if at >= 0:
            yield Action(storing, at, Traffic.STORE)
    if loading.is_update:
        yield from _before_update(loading, workload)


def _before_update(update: StagePass, workload: Workload) -> Iterator[Action]:
    for other in workload.passes:
        if update.round == 0 and workload.chip_of(other) == update.stage:
            yield Action(other, workload.micro_batches - 1)
    for other in workload.updates:
        if other.round == update.round - 1:
            yield Action(other)
