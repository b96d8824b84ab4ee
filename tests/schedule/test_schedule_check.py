"""The checker finds every damage of a schedule and marks the cell."""

import re
from collections.abc import Callable

import pytest

from helpers.workloads import chain, parsed
from poptorch._ir.schedule import Schedule, Workload
from poptorch._ir.spec import Placement, Strategy
from poptorch._schedule import ScheduleError, check, make
from poptorch.enums import Liveness

PIPE = chain([0, 1], 3, rounds=2)
TWICE = chain([0, 1], 2, phased=True)
THREE = chain([0, 1, 0], 2)
PHASED = Placement(Strategy.SERIAL_PHASED, liveness=Liveness.OffChipAfterEachPhase)
GRIDS = {
    "pipe": (PIPE, make(PIPE, Placement())),
    "phased": (TWICE, make(TWICE, PHASED)),
    "three": (THREE, make(THREE, Placement(Strategy.SHARDED))),
}
"""Workloads and their schedules, which are whole."""

Cell = tuple[int, int]
Damage = Callable[[Schedule], Schedule]


def at(schedule: Schedule, action: str) -> Cell:
    """Return (chip, column) of an action."""
    return next((chip, column) for column, chip, a in schedule.cells() if str(a) == action)


def edited(schedule: Schedule, *edits: tuple[Cell, str]) -> Schedule:
    """A copy of a schedule, with other texts in some cells; rows become longer as needed."""
    cells = {c: [str(a) if a else "." for a in row] for c, row in schedule.rows.items()}
    for (chip, column), text in edits:
        row = cells[chip]
        row += ["."] * (column + 1 - len(row))
        row[column] = text
    return parsed("\n".join(f"chip {c}: {' '.join(row)}" for c, row in cells.items()))


def replaced(schedule: Schedule, action: str, by: str) -> Schedule:
    return edited(schedule, (at(schedule, action), by))


def swapped(schedule: Schedule, one: str, other: str) -> Schedule:
    return edited(schedule, (at(schedule, one), other), (at(schedule, other), one))


def appended(schedule: Schedule, *actions: tuple[int, str]) -> Schedule:
    """A copy of a schedule with (chip, action) in further columns, one column for each."""
    size = schedule.columns
    everywhere = [((c, size + len(actions) - 1), ".") for c in schedule.rows]
    own = [((chip, size + i), action) for i, (chip, action) in enumerate(actions)]
    return edited(schedule, *everywhere, *own)


# The damage, the message, and the action whose cell is marked (None: nothing to mark).
DAMAGE = [
    # Something is missing,
    ("pipe", lambda s: replaced(s, "0F2", "."), "1F2 comes before 0F2", "1F2"),
    ("pipe", lambda s: replaced(s, "0B2", "."), "0U0 comes before 0B2", "0U0"),
    ("pipe", lambda s: replaced(s, "1U1", "."), "1U1 is missing", None),
    ("pipe", lambda s: replaced(s, "1U0", "."), "0U1 comes before 1U0", "0U1"),
    ("phased", lambda s: replaced(s, "L1F0", "."), "1F0 comes before L1F0", "1F0"),
    ("phased", lambda s: replaced(s, "S0F0", "."), "L0B0 comes before S0F0", "L0B0"),
    ("phased", lambda s: replaced(s, "S0B1", "."), "S0B1 is missing", None),
    # is done twice,
    ("pipe", lambda s: appended(s, (1, "1F0")), "1F0 is done twice", "1F0"),
    ("pipe", lambda s: edited(s, ((0, 2), "1F0")), "1F0 is done twice", "1F0"),
    # comes too early,
    ("pipe", lambda s: swapped(s, "0F0", "0F1"), "0F1 comes before 0F0", "0F1"),
    ("three", lambda s: swapped(s, "2B0", "2B1"), "2B1 comes before 2B0", "2B1"),
    ("pipe", lambda s: swapped(s, "1F0", "1B0"), "1B0 comes before 1F0", "1B0"),
    ("three", lambda s: swapped(s, "2B1", "0B1"), "0B1 comes before 1B1", "0B1"),
    ("pipe", lambda s: edited(s, ((1, 0), "1F0"), ((1, 1), ".")), "1F0 comes before 0F0", "1F0"),
    (
        "pipe",
        lambda s: appended(replaced(s, "0B2", "."), (0, "0B2")),
        "0U0 comes before 0B2",
        "0U0",
    ),
    ("phased", lambda s: swapped(s, "L1F0", "1F0"), "1F0 comes before L1F0", "1F0"),
    ("phased", lambda s: swapped(s, "S0F0", "0F0"), "S0F0 comes before 0F0", "S0F0"),
    ("phased", lambda s: swapped(s, "S0F0", "L0B0"), "L0B0 comes before S0F0", "L0B0"),
    # is where or what it cannot be,
    (
        "pipe",
        lambda s: edited(replaced(s, "1F0", "."), ((0, 2), "1F0")),
        "1F0 belongs on chip 1",
        "1F0",
    ),
    ("pipe", lambda s: replaced(s, "1F2", "7F2"), "7F2 is not part", "7F2"),
    ("pipe", lambda s: appended(s, (0, "0F3")), "0F3 is not part", "0F3"),
    ("pipe", lambda s: appended(s, (0, "0U2")), "0U2 is not part", "0U2"),
    ("pipe", lambda s: edited(s, ((1, 0), "L1F0")), "L1F0 is not part", "L1F0"),
    # or the rows do not fit.
    ("pipe", lambda s: Schedule({0: s.rows[0]}), "one row for each of the chips 0, 1", None),
    ("pipe", lambda s: Schedule({**s.rows, 2: (None,) * s.columns}), "one row for each", None),
    ("pipe", lambda s: Schedule({**s.rows, 1: s.rows[1][:-1]}), "one length", "."),
]


@pytest.mark.parametrize("name", GRIDS)
def test_a_whole_schedule_has_no_damage(name: str) -> None:
    work, schedule = GRIDS[name]

    assert check(schedule, work) is None


@pytest.mark.parametrize("grid, damage, reason, marked", DAMAGE)
def test_damage_is_found_and_its_reason_given(
    grid: str, damage: Damage, reason: str, marked: str | None
) -> None:
    work, whole = GRIDS[grid]

    with pytest.raises(ScheduleError, match=re.escape(reason)):
        check(damage(whole), work)


def error_of(schedule: Schedule, work: Workload) -> ScheduleError:
    with pytest.raises(ScheduleError) as found:
        check(schedule, work)
    return found.value


@pytest.mark.parametrize("grid, damage, reason, marked", [d for d in DAMAGE if d[3] is not None])
def test_the_damaged_cell_is_marked_in_the_whole_grid(
    grid: str, damage: Damage, reason: str, marked: str
) -> None:
    work, whole = GRIDS[grid]
    broken = damage(whole)

    error = error_of(broken, work)

    text = str(error)
    assert error.cell is not None
    chip, column = error.cell
    assert re.findall(">(.*?)<", text) == [marked]
    assert marked == "." or str(broken.rows[chip][column]) == marked
    assert f"at chip {chip}, column {column}" in text
    assert text.count("\n") == len(broken.rows), "one line for each row of the grid"


@pytest.mark.parametrize("grid, damage, reason, marked", [d for d in DAMAGE if d[3] is None])
def test_damage_without_a_cell_marks_none(
    grid: str, damage: Damage, reason: str, marked: None
) -> None:
    work, whole = GRIDS[grid]

    assert ">" not in str(error_of(damage(whole), work))
