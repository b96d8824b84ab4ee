"""Which stage and device a block gets, by the strategy."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import poptorch
from helpers.placing import X, chain, options, place, stages
from poptorch import (
    AutoStage,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    ShardedExecution,
    Stage,
)
from poptorch._ir.blocks import stage_passes
from poptorch._place.place import phase_number
from poptorch.options.freeze import freeze


@pytest.mark.spec("parallel", 3, 4)
def test_what_precedes_the_first_block_is_on_device_0() -> None:
    layout = chain(None, ("A", 1), None)
    assert stages(layout) == [(0, ()), (1, ("A",))]
    assert layout.chips == 2


@pytest.mark.spec("parallel", 10)
def test_same_as_ipu_needs_a_device() -> None:
    with pytest.raises(AssertionError, match=r"AutoStage\.SameAsIpu .* for block B") as caught:
        chain(("A", 0), ("B", None))
    assert isinstance(caught.value, poptorch.Error)
    assert "placing.py" in str(caught.value)


def test_shards_without_devices_follow_one_another() -> None:
    steps = ("A", None), ("B", None), ("A", None), ("C", 1)
    layout = chain(*steps, strategy=ShardedExecution())
    assert stages(layout) == [(0, ("A",)), (1, ("B",)), (0, ("A",)), (1, ("C",))]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.Block("A"):
                x = self.first(x)
            with poptorch.Block("B"):
                return self.second(x)

    model, x = Named(), torch.randn(2, 4)
    opts = poptorch.Options().setExecutionStrategy(ShardedExecution())
    opts.showCompilationProgressBar(False)
    inference = poptorch.inferenceModel(model, opts)
    expected = model(x)
    torch.testing.assert_close(inference(x), expected)
    assert inference.plan().layout.chips == 2


def test_a_block_name_that_the_model_does_not_have_is_told(caplog) -> None:
    chain(("A", 0), ("B", 0), strategy=PipelinedExecution(Stage("A", "nope"), "B"))
    assert "does not have: nope. It has: A, B" in caplog.text


@pytest.mark.spec("parallel", 9, 12)
def test_auto_increment_counts_blocks_from_1(caplog: pytest.LogCaptureFixture) -> None:
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    layout = chain(None, ("A", 0), ("B", 1), ("C", 0), strategy=strategy)
    assert stages(layout) == [(0, ("A",)), (1, ("B",)), (0, ("C",))]
    assert stages(chain(("A", None), ("B", None), strategy=strategy)) == [(0, ("A",)), (1, ("B",))]
    before = chain(None, ("A", None), ("B", None), strategy=strategy)
    assert [stage.chip for stage in before.stages] == [0, 1, 2]
    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            chain(("A", 0), ("B", 1), ("C", 0), strategy=strategy)
    finally:
        poptorch.setLogLevel("WARN")
    assert "Starting block id=C stage=2 phase=None ipu=0" in caplog.messages
    assert any("ipu(0), stage(2)" in line for line in caplog.messages)
    again = chain(("A", 2), ("A", 2), ("B", 3), strategy=strategy)
    assert stages(again) == [(2, ("A",)), (3, ("B",))]


@pytest.mark.spec("parallel", 11, 12)
def test_a_stage_decides_before_the_block_and_the_block_before_the_number() -> None:
    strategy = PipelinedExecution(Stage("A").ipu(3), "B", ["C"], Stage("unused"))
    layout = chain(("A", 0), ("B", 5), ("C", None), strategy=strategy)
    assert stages(layout) == [(3, ("A",)), (5, ("B",)), (2, ("C",))]


@pytest.mark.spec("parallel", 13, 43)
def test_an_unknown_block_is_found_when_compiling() -> None:
    strategy = PipelinedExecution(Stage("A", "B"))
    with pytest.raises(AssertionError, match="Unknown Block C") as caught:
        chain(("A", 0), ("C", 0), strategy=strategy)
    assert "known blocks: A, B" in str(caught.value)
    assert stages(chain(("A", 0), ("B", 0), strategy=strategy)) == [(0, ("A", "B"))]


@pytest.mark.spec("parallel", 24)
def test_the_parity_of_phases_and_devices_holds_for_defaults_too() -> None:
    strategy = ParallelPhasedExecution(Phase("A"), Phase("B"))
    with pytest.raises(poptorch.Error, match="even phases must run on even IPUs"):
        chain(("A", 0), ("B", 0), strategy=strategy)
    assert stages(chain(("A", 0), ("B", 1), strategy=strategy)) == [(0, ("A",)), (1, ("B",))]
    strategy.phase(1).ipus(2)
    with pytest.raises(poptorch.Error, match="even phases must run on even IPUs"):
        chain(("A", 0), ("B", 1), strategy=strategy)
    serial = poptorch.SerialPhasedExecution(Phase("A"), Phase("B"))
    assert stages(chain(("A", 0), ("B", 0), strategy=serial)) == [(0, ("A",)), (0, ("B",))]


def test_a_negative_device_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="cannot be negative"):
        chain(("A", -1))


@pytest.mark.spec("parallel", 14)
def test_any_printable_id_is_compared_as_text() -> None:
    strategy = PipelinedExecution(Stage("0"), Stage("1"))
    assert stages(chain((0, None), (1, None), strategy=strategy)) == [(0, ("0",)), (1, ("1",))]
    with pytest.raises(AssertionError, match="supposed to be strings"):
        Stage(0)


def test_what_was_decided_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            chain(("A", None), ("B", 1), strategy=PipelinedExecution("A", "B"))
    finally:
        poptorch.setLogLevel("WARN")
    assert "No IPU specified for block A: default to stage_id 0" in caplog.messages
    assert "Starting block id=B stage=1 phase=None ipu=1" in caplog.messages
    assert "enablePipelining set to value 1" in caplog.messages


@pytest.mark.spec("parallel", 49)
def test_every_operator_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return (x.relu() * 2).relu()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2 = nn.Sequential(Inner(), Inner()), Inner()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = self.b1(x * self.scale)
            with poptorch.Block("B", ipu_id=1):
                return poptorch.identity_loss(self.b2(x), "mean")

    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            place(Outer(), X, opts=options())
    finally:
        poptorch.setLogLevel("WARN")
    assert "Mul:0 [float32(2, 4), mode(Pipelined), ipu(0), stage(0)]" in caplog.messages
    assert "b1/0/Relu:0 [float32(2, 4), mode(Pipelined), ipu(0), stage(0)]" in caplog.messages
    assert "b1/1/Relu/1:0 [float32(2, 4), mode(Pipelined), ipu(0), stage(0)]" in caplog.messages
    assert "b2/Relu:0 [float32(2, 4), mode(Pipelined), ipu(1), stage(1)]" in caplog.messages
    backward = "b1/0/ThresholdBackward:0 [float32(2, 4), mode(Pipelined), ipu(0), stage(2)]"
    assert backward in caplog.messages


def test_phases_are_logged_by_their_internal_numbers(caplog: pytest.LogCaptureFixture) -> None:
    strategy = poptorch.SerialPhasedExecution("A", "B")
    strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwdNoOverlap)
    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            chain(("A", 0), ("B", 0), strategy=strategy)
    finally:
        poptorch.setLogLevel("WARN")
    relus = [line for line in caplog.messages if "Relu" in line]
    assert relus == [
        "Relu:0 [float32(2, 4), mode(Phased), ipu(0), phase(0)]",
        "Relu/1:0 [float32(2, 4), mode(Phased), ipu(0), phase(2)]",
    ]
    assert "executionPhaseSettings.phases set to value 6" in caplog.messages
    assert "executionPhaseSettings.stages set to value 1" in caplog.messages


def test_backward_phases_come_after_the_forward_ones() -> None:
    steps = ("A", 0), ("B", 0), ("C", 0)
    for separate, expected in ((False, [2, 3, 4]), (True, [4, 5, 6])):
        strategy = poptorch.SerialPhasedExecution("A", "B", "C").useSeparateBackwardPhase(separate)
        layout = chain(*steps, strategy=strategy)
        placement = freeze(options(strategy), True).placement
        passes = stage_passes(3, training=True)
        numbers = [phase_number(each, layout, placement) for each in passes]
        assert numbers == [0, 1, 2, *expected]


def test_phases_of_unequal_size_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Source: PopTorch user guide, "Phased execution"."""
    poptorch.SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C"), Stage("D")))
    assert not caplog.records
    poptorch.SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C")))
    assert "The phases have 2, 1 stages" in caplog.text


def test_rules_of_blocks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Source: PopTorch user guide, "poptorch.Block and poptorch.BeginBlock"."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unread = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.second(self.first(x))
            self.unread(x)
            return x

    opts = poptorch.Options().deviceIterations(3)
    opts.showCompilationProgressBar(False)
    model = Dead()
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    poptorch.BeginBlock(model.first, "first", ipu_id=0)
    poptorch.BeginBlock(model.unread, "unread", ipu_id=0)
    inference = poptorch.inferenceModel(model, opts)
    inference(torch.randn(6, 4))
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    unread = [m for m in messages if m.startswith("Nothing reads the results of these blocks")]
    assert len(unread) == 1
    assert "left out: unread (" in unread[0]
    early = [m for m in messages if "annotated before a block that runs ahead of it" in m]
    assert len(early) == 1
    assert early[0].startswith("Block second ")
