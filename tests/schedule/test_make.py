"""Schedules of every strategy: golden grids, and how long chips wait."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.workloads import backward, chain, forward, parsed
from poptorch._ir.block_labels import Direction, StagePass, stage_passes
from poptorch._ir.plan import Staged
from poptorch._ir.schedule import Schedule, Workload
from poptorch._ir.spec import Placement, Strategy
from poptorch._schedule import check, make
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


@pytest.mark.parametrize(
    "work, how, expected",
    [
        (chain([0, 1], 4), PIPELINED, GROUPED),
        (chain([0, 1], 4), ONE_F_ONE_B, INTERLEAVED),
        (chain([0, 1], 2), Placement(Strategy.SHARDED), SHARDED),
        (PHASED, Placement(Strategy.SERIAL_PHASED, liveness=EACH), SERIAL),
        (PHASED, Placement(Strategy.SERIAL_PHASED, liveness=Liveness.OffChipAfterFwd), LATE),
        (PHASED, Placement(Strategy.PARALLEL_PHASED, liveness=EACH), PARALLEL),
        (chain([0, 1], 3, training=False), PIPELINED, INFERENCE),
    ],
    ids=["grouped", "interleaved", "sharded", "serial", "late", "parallel", "infers"],
)
def test_a_strategy_has_this_grid(work: Workload, how: Placement, expected: str) -> None:
    schedule = make(work, how)

    assert str(schedule) == expected.strip()
    check(schedule, work)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    chips=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    micro_batches=st.integers(1, 9),
    training=st.booleans(),
    strategy=st.sampled_from(Strategy),
    interleaved=st.booleans(),
    liveness=st.sampled_from(Liveness),
    rounds=st.integers(1, 3),
)
def test_every_schedule_does_its_work_and_can_be_read_back(
    chips: list[int],
    micro_batches: int,
    training: bool,
    strategy: Strategy,
    interleaved: bool,
    liveness: Liveness,
    rounds: int,
) -> None:
    how = Placement(strategy, interleaved=interleaved, liveness=liveness)
    work = chain(chips, micro_batches, training, phased=how.phased, rounds=rounds)

    schedule = make(work, how)

    check(schedule, work)
    assert parsed(str(schedule)) == schedule
    assert 0 <= schedule.bubble < 1


# How many activations wait.

STAGES = 4


def waiting(schedule: Schedule, stage: int) -> int:
    """How many micro-batches wait at most between a stage's two passes."""
    balance = most = 0
    for _, _, each in schedule.cells():
        if each.traffic is None and each.stage_pass in (forward(stage), backward(stage)):
            balance += -1 if each.stage_pass.backward else 1
            most = max(most, balance)
    return most


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_grouped_pipeline_keeps_two_micro_batches_for_each_later_stage(stage: int) -> None:
    schedule = make(chain(range(STAGES), 16), PIPELINED)

    later = STAGES - 1 - stage
    assert waiting(schedule, stage) == 2 * later + 1


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_interleaved_pipeline_keeps_one_micro_batch_for_each_later_stage(stage: int) -> None:
    schedule = make(chain(range(STAGES), 16), ONE_F_ONE_B)

    later = STAGES - 1 - stage
    assert waiting(schedule, stage) == later + 1


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_interleaved_pipeline_over_processes_keeps_one_more_before_the_last_stage(
    stage: int,
) -> None:
    work = chain(range(STAGES), 16)

    schedule = make(work, ONE_F_ONE_B, True)

    check(schedule, work)
    later = STAGES - 1 - stage
    assert waiting(schedule, stage) == later + 1 + (1 if later else 0)


# How long chips idle.

MICRO_BATCHES = 32
FILLING_AND_DRAINING = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
"""The share of the time that a chip idles if all stages take as long."""


def test_a_pipeline_idles_only_while_it_fills_and_drains() -> None:
    schedule = make(chain(range(STAGES), MICRO_BATCHES, training=False), PIPELINED)

    assert schedule.columns == MICRO_BATCHES + STAGES - 1
    assert schedule.bubble == pytest.approx(FILLING_AND_DRAINING)


def test_one_stage_never_idles() -> None:
    assert make(chain([0], 3), PIPELINED).bubble == 0


over_processes = pytest.mark.parametrize(
    "how, spread",
    [(PIPELINED, True), (ONE_F_ONE_B, False), (ONE_F_ONE_B, True)],
    ids=["grouped over processes", "interleaved", "interleaved over processes"],
)


def staged(how: Placement, spread: bool) -> Staged:
    """A pipeline in training, whose chips wait for what they read and not for columns."""
    work = chain(range(STAGES), MICRO_BATCHES)
    chips = dict(enumerate(range(STAGES)))
    return Staged({}, {}, (), work, make(work, how, spread), chips)


@over_processes
def test_processes_of_equal_stages_idle_only_while_the_pipeline_fills_and_drains(
    how: Placement, spread: bool
) -> None:
    assert staged(how, spread).bubble == pytest.approx(FILLING_AND_DRAINING)


@over_processes
def test_processes_wait_for_the_slowest_stage(how: Placement, spread: bool) -> None:
    """The last stage takes 2, the other three take 1."""
    pipeline = staged(how, spread)
    work = {each: 2 if each.stage == STAGES - 1 else 1 for each in pipeline.workload.passes}

    slower = replace(pipeline, work=work)

    until_the_last_stage_begins = STAGES - 1
    took = 2 * until_the_last_stage_begins + MICRO_BATCHES * 2 * 2
    busy = MICRO_BATCHES * 2 * (1 + 1 + 1 + 2)
    assert slower.bubble == pytest.approx(1 - busy / (STAGES * took))


# The order of passes.

UPDATES = [StagePass(chip, Direction.UPDATE, rounds) for rounds in (0, 1) for chip in (0, 2)]
PASSES = list(stage_passes(3, training=True))


@pytest.mark.spec("parallel", 16)
def test_passes_of_training_go_forward_and_then_back() -> None:
    assert list(map(str, PASSES)) == ["0F", "1F", "2F", "2B", "1B", "0B"]


@pytest.mark.spec("parallel", 16)
def test_passes_of_inference_go_forward() -> None:
    assert list(map(str, stage_passes(2, training=False))) == ["0F", "1F"]


def test_passes_are_sorted_as_values_flow_and_updates_come_last_round_by_round() -> None:
    in_order = sorted([*UPDATES, *reversed(PASSES)])

    assert in_order == [*PASSES, *UPDATES]
    assert list(map(str, UPDATES)) == ["0U0", "2U0", "0U1", "2U1"]


def test_the_delay_of_a_pass_is_its_distance_from_the_first() -> None:
    assert [stage_pass.delay(3) for stage_pass in PASSES] == [0, 1, 2, 2, 3, 4]
