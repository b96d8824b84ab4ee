"""Schedules of every strategy: golden grids, properties, and how many activations wait."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.workloads import backward, chain, forward, parsed
from poptorch._ir.blocks import Direction, StagePass, stage_passes
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
EACH = Liveness.OffChipAfterEachPhase
PHASED = chain([0, 1], 1, phased=True)


@pytest.mark.parametrize("work, how, expected", [
    (chain([0, 1], 4), PIPELINED, GROUPED),
    (chain([0, 1], 4), Placement(Strategy.PIPELINED, interleaved=True), INTERLEAVED),
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
    interleaved = make(work, Placement(Strategy.PIPELINED, interleaved=True))
    for stage in range(stages):
        assert waiting(grouped, stage) == 2 * (stages - 1 - stage) + 1
        assert waiting(interleaved, stage) == stages - stage


def test_a_pipeline_idles_only_while_it_fills_and_drains() -> None:
    stages, micros = 4, 32
    schedule = make(chain(range(stages), micros, training=False), PIPELINED)
    assert schedule.columns == micros + stages - 1
    assert schedule.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
    assert make(chain([0], 3), PIPELINED).bubble == 0


@pytest.mark.spec("parallel", 16)
def test_passes_are_ordered_as_values_flow() -> None:
    updates = [StagePass(chip, Direction.UPDATE, rounds) for rounds in (0, 1) for chip in (0, 2)]
    passes = list(stage_passes(3, training=True))
    assert " ".join(map(str, [*passes, *updates])) == "0F 1F 2F 2B 1B 0B 0U0 2U0 0U1 2U1"
    assert sorted([*updates, *reversed(passes)]) == [*passes, *updates]
    assert [stage_pass.delay(3) for stage_pass in passes] == [0, 1, 2, 2, 3, 4]
    assert list(map(str, stage_passes(2, training=False))) == ["0F", "1F"]
