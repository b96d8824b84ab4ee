"""What is logged of a placement, and what of it deserves a warning."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import poptorch
from helpers.placing import X, chain, options, place
from helpers.wrapping import Having
from helpers.wrapping import options as quick
from poptorch import Phase, PipelinedExecution, SerialPhasedExecution, Stage
from poptorch._ir.blocks import stage_passes
from poptorch._place.place import phase_number
from poptorch.options.freeze import freeze


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the engine's log is told at its lowest level."""
    poptorch.setLogLevel("DEBUG")
    with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
        yield caplog.messages
    poptorch.setLogLevel("WARN")


@pytest.mark.spec("parallel", 9, 49)
def test_what_was_decided_is_logged_and_every_operator_with_its_place(told, caplog) -> None:
    chain(("A", None), ("B", 1), strategy=PipelinedExecution(Stage("A", "nope"), "B"))
    assert "does not have: nope. It has: A, B" in caplog.text
    assert "No IPU specified for block A: default to stage_id 0" in caplog.messages
    assert "Starting block id=B stage=1 phase=None ipu=1" in caplog.messages
    nothing = place(nn.Identity(), X, opts=options(training=False), training=False)
    assert (nothing.chips, nothing.reserved) == (0, 0)
    assert "No IPU is used" in caplog.text

    def twice(model, x):
        return (x.relu() * 2).relu()

    def outer(model, x):
        x = model.b1(x * model.scale)
        with poptorch.Block("B", ipu_id=1):
            return poptorch.identity_loss(model.b2(x), "mean")

    b1, b2 = nn.Sequential(Having(twice), Having(twice)), Having(twice)
    place(Having(outer, b1=b1, b2=b2, scale=nn.Parameter(torch.ones(4))), X, opts=options())
    for name, chip, stage in (
        ("Mul:0", 0, 0), ("b1/0/Relu:0", 0, 0), ("b1/1/Relu/1:0", 0, 0), ("b2/Relu:0", 1, 1),
        ("b1/0/ThresholdBackward:0", 0, 2),
    ):  # fmt: skip
        where = f"[float32(2, 4), mode(Pipelined), ipu({chip}), stage({stage})]"
        assert f"{name} {where}" in caplog.messages


@pytest.mark.parametrize("liveness, separate, total, expected", [
    ("AlwaysLive", False, 3, [0, 1, 2, 2, 3, 4]), ("AlwaysLive", True, 4, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwd", False, 6, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwd", True, 6, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwdNoOverlap", False, 8, [0, 2, 4, 8, 10, 12]),
    ("OffChipAfterEachPhase", True, 12, [0, 4, 8, 16, 20, 24]),
])  # fmt: skip
def test_backward_phases_come_after_the_forward_ones(liveness, separate, total, expected) -> None:
    strategy = SerialPhasedExecution("A", "B", "C").useSeparateBackwardPhase(separate)
    strategy.setTensorsLiveness(poptorch.Liveness[liveness])
    layout = chain(("A", 0), ("B", 0), ("C", 0), strategy=strategy)
    placement = freeze(options(strategy), True).placement
    numbers = [phase_number(each, layout, placement) for each in stage_passes(3, training=True)]
    assert (placement.total_phases, numbers) == (total, expected)


def test_rules_of_blocks_and_phases_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Source: PopTorch user guide, "poptorch.Block and poptorch.BeginBlock", "Phased execution"."""
    SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C")))
    assert "The phases have 2, 1 stages" in caplog.text
    caplog.clear()

    def dead(model, x):
        x = model.second(model.first(x))
        model.unread(x)
        return x

    model = Having(dead, **{name: nn.Linear(4, 4) for name in ("first", "second", "unread")})
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    poptorch.BeginBlock(model.first, "first", ipu_id=0)
    poptorch.BeginBlock(model.unread, "unread", ipu_id=0)
    x = torch.randn(6, 4)
    got = poptorch.inferenceModel(model, quick(iterations=3))(x)
    torch.testing.assert_close(got, model(x).detach())
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (unread,) = [m for m in messages if m.startswith("Nothing reads the results of these blocks")]
    assert "left out: unread (" in unread
    (early,) = [m for m in messages if "annotated before a block that runs ahead of it" in m]
    assert early.startswith("Block second ")
