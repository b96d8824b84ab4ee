"""Proving a schedule: right place, nothing missing or doubled, everything in order."""

from __future__ import annotations

from collections.abc import Iterator

from .._ir.schedule import Action, Do, Move, Part, Schedule, Work


class ScheduleError(AssertionError):
    """A schedule does not do its work. The text shows the grid with the faulty cell marked.

    Attributes:
        reason: what is wrong, in one sentence.
        cell: (chip, column) of the fault, or None where something is missing altogether.
    """

    def __init__(self, schedule: Schedule, reason: str, cell: tuple[int, int] | None) -> None:
        self.reason = reason
        self.cell = cell
        where = f" at chip {cell[0]}, column {cell[1]}" if cell else ""
        super().__init__(f"{reason}{where}\n{schedule.grid(cell)}")


def check(schedule: Schedule, work: Work) -> None:
    """Check that a schedule does its work.

    The rules: a row for each chip, all of one length; every action on the chip of its part, exactly
    once; every part after what it reads, in an earlier column; micro-batches in order; loads before
    and stores after their work, and loads not before what they bring back was stored; updates after
    all else on their chip, and each round after the one before it on all chips.

    Raises:
        ScheduleError: a rule is broken; the first fault in the order of the columns.
    """
    _check_rows(schedule, work)
    expected = set(work.actions())
    column: dict[Action, int] = {}
    for at, chip, action in schedule.cells():
        cell = (chip, at)
        if action not in expected:
            raise ScheduleError(schedule, f"{action} is no part of the work", cell)
        if action in column:
            raise ScheduleError(schedule, f"{action} is done twice", cell)
        home = work.chip_of(action.part)
        if chip != home:
            raise ScheduleError(schedule, f"{action} belongs on chip {home}", cell)
        for needed in _needs(action, work):
            if needed in expected and column.get(needed, at) >= at:
                raise ScheduleError(schedule, f"{action} comes before {needed}", cell)
        column[action] = at
    for action in work.actions():
        if action not in column:
            raise ScheduleError(schedule, f"{action} is missing", None)


def _check_rows(schedule: Schedule, work: Work) -> None:
    if sorted(schedule.rows) != work.all_chips:
        chips = ", ".join(map(str, work.all_chips))
        raise ScheduleError(schedule, f"there must be one row for each of the chips {chips}", None)
    for chip, row in schedule.rows.items():
        if len(row) != schedule.columns:
            raise ScheduleError(schedule, "all rows must have one length", (chip, len(row)))


def _needs(action: Action, work: Work) -> Iterator[Action]:
    """Yield what must be done in earlier columns, whether it is part of the work or not."""
    part, micro = action.part, action.micro
    if action.move is Move.STORE:
        yield Action(part, micro)
        return
    if action.move is Move.LOAD:
        yield from _before_load(part, micro, work)
        return
    yield Action(part, micro, Move.LOAD)
    if micro:
        yield Action(part, micro - 1)
    if part.do is Do.UPDATE:
        yield from _before_update(part, work)
        return
    for needed in work.needs.get(part, ()):
        yield Action(needed, micro)


def _before_load(part: Part, micro: int, work: Work) -> Iterator[Action]:
    """What it brings back must have been stored: for this micro-batch, or for all before it."""
    for stored in work.fetches.get(part, ()):
        if part.do is not Do.UPDATE:  # a part that comes later stored it a micro-batch ago
            at = micro if _rank(stored, work) < _rank(part, work) else micro - 1
        else:
            at = 0 if stored.do is Do.UPDATE else work.micros - 1
        if at >= 0:
            yield Action(stored, at, Move.STORE)
    if part.do is Do.UPDATE:
        yield from _before_update(part, work)


def _rank(part: Part, work: Work) -> int:
    last = 2 * len(work.chips) - 1
    return part.index if part.do is Do.FORWARD else last - part.index


def _before_update(part: Part, work: Work) -> Iterator[Action]:
    last = work.micros - 1
    for other in work.parts:
        if part.round == 0 and work.chip_of(other) == part.index:
            yield Action(other, last)
    for other in work.update_parts:
        if other.round == part.round - 1:
            yield Action(other)
