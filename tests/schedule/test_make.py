"""Schedules of every strategy: golden grids, properties, what the checker finds, drawings."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.workloads import backward, chain, forward, parsed
from poptorch._ir.blocks import Direction, StagePass, stage_passes
from poptorch._ir.plan import Staged
from poptorch._ir.schedule import Schedule, Workload
from poptorch._ir.spec import Placement, Strategy
from poptorch._schedule import ScheduleError, check, make
from poptorch.enums import Liveness

GROUPED = """
chip 0: 0F0 0F1 .   0F2 0B0 0F3 0B1 .   0B2 0B3 0U0
chip 1: .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 .   1U0
"""
INTERLEAVED = """
chip 0: 0F0 0F1 .   0B0 0F2 0B1 0F3 0B2 .   0B3 0U0
chip 1: .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 .   1U0
"""
SHARDED = """
chip 0: 0F0 .   .   0B0 0F1 .   .   0B1 0U0
chip 1: .   1F0 1B0 .   .   1F1 1B1 .   1U0
"""
SERIAL = """
chip 0: L0F0 0F0 S0F0 .    .   .    .    .   .    L0B0 0B0 S0B0 0U0
chip 1: .    .   .    L1F0 1F0 S1F0 L1B0 1B0 S1B0 .    .   .    1U0
"""
LATE = """
chip 0: L0F0 0F0 .    .   S0F0 .    .   .    L0B0 0B0 S0B0 0U0
chip 1: .    .   L1F0 1F0 S1F0 L1B0 1B0 S1B0 .    .   .    1U0
"""
PARALLEL = """
chip 0: L0F0 0F0 S0F0 L0B0 .    .   0B0  S0B0 0U0
chip 1: L1F0 .   1F0  S1F0 L1B0 1B0 S1B0 .    1U0
"""
INFERENCE = """
chip 0: 0F0 0F1 0F2 .
chip 1: .   1F0 1F1 1F2
"""
PIPELINED = Placement(Strategy.PIPELINED)
ONE_F_ONE_B = Placement(Strategy.PIPELINED, interleaved=True)
EACH = Liveness.OffChipAfterEachPhase
PHASED = chain([0, 1], 1, phased=True)


@pytest.mark.parametrize("work, how, expected", [
    (chain([0, 1], 4), PIPELINED, GROUPED),
    (chain([0, 1], 4), ONE_F_ONE_B, INTERLEAVED),
    (chain([0, 1], 2), Placement(Strategy.SHARDED), SHARDED),
    (PHASED, Placement(Strategy.SERIAL_PHASED, liveness=EACH), SERIAL),
    (PHASED, Placement(Strategy.SERIAL_PHASED, liveness=Liveness.OffChipAfterFwd), LATE),
    (PHASED, Placement(Strategy.PARALLEL_PHASED, liveness=EACH), PARALLEL),
    (chain([0, 1], 3, training=False), PIPELINED, INFERENCE),
], ids=["grouped", "interleaved", "sharded", "serial", "late", "parallel", "infers"])  # fmt: skip
def test_grids(work: Workload, how: Placement, expected: str) -> None:
    schedule = make(work, how)
    assert str(schedule) == expected.strip()
    check(schedule, work)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 9), st.booleans(),
    st.sampled_from(Strategy), st.booleans(), st.sampled_from(Liveness), st.integers(1, 3),
)  # fmt: skip
def test_schedules_do_their_work(chips, micros, training, strategy, interleaved, liveness, rounds):
    how = Placement(strategy, interleaved=interleaved, liveness=liveness)
    work = chain(chips, micros, training, phased=how.phased, rounds=rounds)
    schedule = make(work, how)
    check(schedule, work)
    assert parsed(str(schedule)) == schedule
    assert 0 <= schedule.bubble < 1


def waiting(schedule: Schedule, stage: int) -> int:
    """Return how many micro-batches wait at most between a stage's two parts."""
    balance, most = 0, 0
    for _, _, each in schedule.cells():
        if each.traffic is None and each.stage_pass in (forward(stage), backward(stage)):
            balance += -1 if each.stage_pass.backward else 1
            most = max(most, balance)
    return most


def test_interleaving_keeps_fewer_activations() -> None:
    stages = 4
    work = chain(range(stages), 16)
    grouped = make(work, PIPELINED)
    interleaved, spread = (make(work, ONE_F_ONE_B, over) for over in (False, True))
    check(spread, work)
    for stage in range(stages):
        assert waiting(grouped, stage) == 2 * (stages - 1 - stage) + 1
        assert waiting(interleaved, stage) == stages - stage
        assert waiting(spread, stage) == stages - stage + (stage < stages - 1)


def test_a_pipeline_idles_only_while_it_fills_and_drains() -> None:
    stages, micros = 4, 32
    schedule = make(chain(range(stages), micros, training=False), PIPELINED)
    assert schedule.columns == micros + stages - 1
    assert schedule.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
    assert make(chain([0], 3), PIPELINED).bubble == 0
    work, chips = chain(range(stages), micros), dict(enumerate(range(stages)))
    for how, spread in ((PIPELINED, True), (ONE_F_ONE_B, False), (ONE_F_ONE_B, True)):
        # Processes wait for what they read, not for columns; here the last stage is the slowest.
        staged = Staged({}, {}, (), work, make(work, how, spread), chips)
        assert staged.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
        slower = replace(staged, work={each: 1 + each.stage // 3 for each in work.passes})
        took = 2 * 3 + micros * 2 * 2
        assert slower.bubble == pytest.approx(1 - micros * 2 * (3 + 2) / (4 * took))


@pytest.mark.spec("parallel", 16)
def test_passes_are_ordered_as_values_flow() -> None:
    updates = [StagePass(chip, Direction.UPDATE, rounds) for rounds in (0, 1) for chip in (0, 2)]
    passes = list(stage_passes(3, training=True))
    assert " ".join(map(str, [*passes, *updates])) == "0F 1F 2F 2B 1B 0B 0U0 2U0 0U1 2U1"
    assert sorted([*updates, *reversed(passes)]) == [*passes, *updates]
    assert [stage_pass.delay(3) for stage_pass in passes] == [0, 1, 2, 2, 3, 4]
    assert list(map(str, stage_passes(2, training=False))) == ["0F", "1F"]


PIPE = chain([0, 1], 3, rounds=2)
TWICE = chain([0, 1], 2, phased=True)
THREE = chain([0, 1, 0], 2)
GRIDS = {
    "pipe": (PIPE, make(PIPE, Placement())),
    "phased": (TWICE, make(TWICE, Placement(Strategy.SERIAL_PHASED, liveness=EACH))),
    "three": (THREE, make(THREE, Placement(Strategy.SHARDED))),
}
Cell = tuple[int, int]


def at(schedule: Schedule, action: str) -> Cell:
    """Return (chip, column) of an action."""
    return next((chip, column) for column, chip, a in schedule.cells() if str(a) == action)


def edited(schedule: Schedule, *edits: tuple[Cell, str]) -> Schedule:
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
    size = schedule.columns
    everywhere = [((c, size + len(actions) - 1), ".") for c in schedule.rows]
    own = [((chip, size + i), action) for i, (chip, action) in enumerate(actions)]
    return edited(schedule, *everywhere, *own)


# The damage, what is said of it, and the action whose cell is marked (None: nothing to mark).
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
    ("pipe", lambda s: appended(replaced(s, "0B2", "."), (0, "0B2")),
     "0U0 comes before 0B2", "0U0"),
    ("phased", lambda s: swapped(s, "L1F0", "1F0"), "1F0 comes before L1F0", "1F0"),
    ("phased", lambda s: swapped(s, "S0F0", "0F0"), "S0F0 comes before 0F0", "S0F0"),
    ("phased", lambda s: swapped(s, "S0F0", "L0B0"), "L0B0 comes before S0F0", "L0B0"),
    # is where or what it cannot be,
    ("pipe", lambda s: edited(replaced(s, "1F0", "."), ((0, 2), "1F0")),
     "1F0 belongs on chip 1", "1F0"),
    ("pipe", lambda s: replaced(s, "1F2", "7F2"), "7F2 is no part", "7F2"),
    ("pipe", lambda s: appended(s, (0, "0F3")), "0F3 is no part", "0F3"),
    ("pipe", lambda s: appended(s, (0, "0U2")), "0U2 is no part", "0U2"),
    ("pipe", lambda s: edited(s, ((1, 0), "L1F0")), "L1F0 is no part", "L1F0"),
    # or the rows do not fit.
    ("pipe", lambda s: Schedule({0: s.rows[0]}), "one row for each of the chips 0, 1", None),
    ("pipe", lambda s: Schedule({**s.rows, 2: (None,) * s.columns}), "one row for each", None),
    ("pipe", lambda s: Schedule({**s.rows, 1: s.rows[1][:-1]}), "one length", "."),
]  # fmt: skip


@pytest.mark.parametrize("grid, damage, reason, marked", DAMAGE)
def test_damage_is_found_and_marked(grid: str, damage, reason: str, marked: str | None) -> None:
    work, whole = GRIDS[grid]
    check(whole, work)
    broken = damage(whole)
    with pytest.raises(ScheduleError, match=re.escape(reason)) as caught:
        check(broken, work)
    text = str(caught.value)
    if marked is None:
        assert ">" not in text
        return
    assert re.findall(">(.*?)<", text) == [marked]
    chip, column = caught.value.cell
    assert marked == "." or str(broken.rows[chip][column]) == marked
    assert f"at chip {chip}, column {column}" in text
    assert text.count("\n") == len(broken.rows)  # the whole grid is shown


SCHEDULE = make(chain([0, 1], 3), Placement())
ACTIONS = [str(action) for _, _, action in SCHEDULE.cells()]
SVG = "{http://www.w3.org/2000/svg}"


def test_svg_shows_every_action_in_its_row_and_column() -> None:
    root = ElementTree.fromstring(SCHEDULE.to_svg())
    assert [text.text for text in root.findall(f"{SVG}text")] == ["chip 0", "chip 1", *ACTIONS]
    boxes = root.findall(f"{SVG}rect")
    cells = {(float(box.get("x")), float(box.get("y"))) for box in boxes}
    assert len(cells) == len(boxes) == len(ACTIONS)
    assert len({y for _, y in cells}) == 2
    width = float(root.get("width"))
    assert all(x + float(boxes[0].get("width")) <= width for x, _ in cells)
    assert boxes[0].find(f"{SVG}title").text == "forward of stage 0, micro-batch 0"


def test_the_trace_has_a_thread_for_each_chip_and_moves_are_drawn_as_such() -> None:
    events = json.loads(SCHEDULE.to_trace(microseconds=10))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "chip 0", 1: "chip 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ACTIONS
    for span in spans:
        assert str(SCHEDULE.rows[span["tid"]][int(span["ts"] / 10)]) == span["name"]
        assert span["dur"] == 10
    assert {span["cat"] for span in spans} == {"forward", "backward", "update"}
    schedule = parsed("chip 3: L0F0 0F0 S0F0")
    events = json.loads(schedule.to_trace())["traceEvents"]
    assert [e["cat"] for e in events if e["ph"] == "X"] == ["load", "forward", "store"]
    assert "load for forward of stage 0, micro-batch 0" in schedule.to_svg()
