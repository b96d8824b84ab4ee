"""Counting devices, and the rules about counts and batches (spec/parallel.md sections 4 and 5)."""

from __future__ import annotations

import logging

import pytest

import poptorch
from helpers.placing import Chain, X, chain, options, place
from poptorch import AutoStage, PipelinedExecution, SerialPhasedExecution, ShardedExecution

FOUR = (("A", 0), ("B", 1), ("C", 2), ("D", 3))


@pytest.mark.spec("parallel", 17, 18)
def test_training_needs_a_micro_batch_for_every_stage() -> None:
    with pytest.raises(poptorch.Error, match="gradientAccumulation must be greater than or equal"):
        chain(*FOUR, accumulation=6)
    with pytest.raises(poptorch.Error, match=r"\(7\)") as caught:
        chain(*FOUR, accumulation=6)
    assert "there are 3 additional stages" in str(caught.value)
    assert chain(*FOUR, accumulation=7).depth == 4
    chain(*FOUR, accumulation=1, strategy=ShardedExecution())
    phases = SerialPhasedExecution("A", "B", "C", "D")
    chain(*FOUR, accumulation=1, strategy=phases)


@pytest.mark.spec("parallel", 17)
def test_inference_needs_an_iteration_for_every_stage() -> None:
    with pytest.raises(poptorch.Error, match=r"deviceIterations must be greater .* \(4\)"):
        chain(*FOUR, training=False, iterations=3)
    chain(*FOUR, training=False, iterations=4)
    chain(*FOUR, training=False, iterations=1, strategy=ShardedExecution())


@pytest.mark.spec("parallel", 19)
def test_one_device_has_no_bound() -> None:
    assert chain(None, None, accumulation=1).depth == 1
    assert chain(("A", 0), ("B", 0), accumulation=1).depth == 1


@pytest.mark.spec("parallel", 16)
def test_coming_back_to_a_device_counts_again() -> None:
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    assert chain(("A", 0), ("B", 1), ("C", 0), strategy=strategy).depth == 3
    assert chain(("A", 1), strategy=strategy).depth == 2  # it starts from device 0


@pytest.mark.spec("parallel", 21)
def test_devices_are_counted_up_to_the_highest() -> None:
    layout = chain(("A", 3))
    assert (layout.chips, layout.reserved) == (4, 4)


@pytest.mark.spec("parallel", 22)
def test_three_devices_need_rounding(caplog: pytest.LogCaptureFixture) -> None:
    opts = options()
    opts.autoRoundNumIPUs(False)
    with pytest.raises(poptorch.Error, match="must reserve a minimum of 4") as caught:
        place(Chain(*FOUR[:3]), X, opts=opts)
    assert "model specifies the use of 3 IPUs" in str(caught.value)
    assert "autoRoundNumIPUs(True)" in str(caught.value)
    with caplog.at_level(logging.WARNING, logger="poptorch:cpp"):
        layout = chain(*FOUR[:3])
    assert (layout.chips, layout.reserved) == (3, 4)
    assert "1 of the IPUs will be idle" in caplog.text


def test_replicas_multiply_devices() -> None:
    opts = options().replicationFactor(3)
    layout = place(Chain(*FOUR[:2]), X, opts=opts)
    assert (layout.chips, layout.reserved) == (2, 8)


@pytest.mark.spec("parallel", 23)
def test_no_more_than_64_devices() -> None:
    chain(None, ("A", 63))
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)") as caught:
        chain(None, ("A", 64))
    assert "require distributed execution" in str(caught.value)
    with pytest.raises(poptorch.Error, match="Too many IPUs"):
        place(Chain(*FOUR), X, opts=options().replicationFactor(17).useIpuModel(True))


def test_simulation_has_no_power_of_two() -> None:
    opts = options().useIpuModel(True)
    opts.autoRoundNumIPUs(False)
    assert place(Chain(*FOUR[:3]), X, opts=opts).reserved == 3


def test_a_model_of_which_nothing_is_left_uses_no_device(caplog: pytest.LogCaptureFixture) -> None:
    class Identity(poptorch.Block):
        def forward(self, x):
            return x

    with caplog.at_level(logging.INFO, logger="poptorch:cpp"):
        poptorch.setLogLevel("INFO")
        layout = place(Identity(), X, opts=options(training=False), training=False)
        poptorch.setLogLevel("WARN")
    assert (layout.chips, layout.reserved) == (0, 0)
    assert "No IPU is used" in caplog.text
