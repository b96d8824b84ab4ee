"""Counting devices, and the rules about counts and batches (spec/parallel.md sections 4 and 5)."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

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


class FirstRelease(nn.Module):
    """Layers annotated in ``forward`` with the 1.0 interface, each on a device."""

    def __init__(self, *ipus: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in ipus)
        self.ipus = ipus

    def forward(self, x):
        for ipu, layer in zip(self.ipus, self.layers, strict=True):
            x = poptorch.IPU(ipu, layer)(x).tanh()
        return x, poptorch.identity_loss(x, "mean")


@pytest.mark.spec("parallel", 17, 46)
@pytest.mark.parametrize("ipus", [(0, 1), (1,)])
def test_the_first_release_needs_a_micro_batch_for_every_stage_that_is_there(ipus) -> None:
    model, count = FirstRelease(*ipus), len(ipus)
    eager = copy.deepcopy(model)
    training = poptorch.trainingModel(
        model, 1, gradient_accumulation=count,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    x = torch.randn(2 * count, 4)
    for _ in range(2):
        training(x)
        optimizer.zero_grad()
        sum(eager(part)[1] / count for part in x.chunk(count)).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    inference = poptorch.inferenceModel(model, device_iterations=count)
    torch.testing.assert_close(inference(x)[0][-2:], eager(x)[0][-2:])


def test_the_first_release_refuses_fewer_micro_batches() -> None:
    few = poptorch.trainingModel(FirstRelease(0, 1), 2, gradient_accumulation=1)
    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(2\)"):
        few.compile(X)
    with pytest.raises(poptorch.Error, match=r"deviceIterations .* number of pipeline stages"):
        poptorch.inferenceModel(FirstRelease(0, 1), device_iterations=1).compile(X)


def test_eager_calls_may_annotate_a_layer_again_but_not_move_it() -> None:
    model = FirstRelease(0, 1)
    x = torch.randn(2, 4)
    assert torch.equal(model(x)[0], model(x)[0])
    with pytest.raises(poptorch.Error, match="already been assigned"):
        poptorch.IPU(3, model.layers[0])


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
