"""The one value for a stage's pass: its text and its order."""

from __future__ import annotations

import random

import pytest

from poptorch._ir.blocks import Direction, StagePass, stage_passes

UPDATES = [StagePass(chip, Direction.UPDATE, rounds) for rounds in (0, 1) for chip in (0, 2)]


def test_passes_are_ordered_as_values_flow() -> None:
    ordered = [*stage_passes(3, training=True), *UPDATES]
    assert " ".join(map(str, ordered)) == "0F 1F 2F 2B 1B 0B 0U0 2U0 0U1 2U1"
    assert sorted(random.Random(0).sample(ordered, len(ordered))) == ordered
    assert max(ordered[:4]) == StagePass(2, Direction.BACKWARD)


def test_inference_goes_forward_only() -> None:
    assert list(map(str, stage_passes(2, training=False))) == ["0F", "1F"]


@pytest.mark.spec("parallel", 16)
def test_the_last_stage_goes_back_at_once() -> None:
    delays = [stage_pass.delay(3) for stage_pass in stage_passes(3, training=True)]
    assert delays == [0, 1, 2, 2, 3, 4]
