"""Attach, detach, connection types, devices held and given back, failures on purpose."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import Regression as Net
from helpers.wrapped import inference, normal, options
from poptorch import ConnectionType

X, Y = normal(4, 4), normal(4, 2, seed=1)


def wrapped(opts: poptorch.Options | None = None, model: nn.Module | None = None):
    model = model or Net()
    return poptorch.trainingModel(
        model, opts or options(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )


@pytest.mark.spec("executor", 41)
def test_attach_and_detach() -> None:
    training = wrapped()
    assert not training.isAttachedToDevice()
    training(X, Y)
    assert training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        training.attachToDevice()
    training.detachFromDevice()
    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        training.detachFromDevice()
    training.copyWeightsToHost()  # nothing to do, and no harm
    training(X, Y)  # attaches by itself
    assert training.isAttachedToDevice()


@pytest.mark.spec("runtime", 1, 11, 34)
def test_two_models_on_one_device_take_turns() -> None:
    first = wrapped(options().useIpuId(3))
    second = wrapped(options().useIpuId(3))  # wrapping acquires nothing
    first(X, Y)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 3"):
        second(X, Y)
    assert not second.isCompiled()
    first.detachFromDevice()
    second(X, Y)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 3"):
        first(X, Y)
    assert first.isCompiled()
    second.destroy()
    first(X, Y)
    del first
    gc.collect()
    second(X, Y)


@pytest.mark.spec("executor", 64)
@pytest.mark.spec("programs", 16)
def test_inference_gets_the_last_weights_and_the_device_of_a_trainer_that_is_gone() -> None:
    model = Net()
    training = wrapped(options().useIpuId(2), model)
    validation = poptorch.inferenceModel(model, options().useIpuId(2))
    before = validation(X)
    validation.detachFromDevice()
    training(X, Y)
    training.destroy()
    after = validation(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(X).detach())
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(validation(X), after)  # only once


@pytest.mark.spec("runtime", 33)
def test_connection_types(caplog) -> None:
    never = wrapped(options().connectionType(ConnectionType.Never))
    never.compile(X, Y)
    assert never.isCompiled()
    assert not never.isAttachedToDevice()
    assert never.getTensorNames()
    with pytest.raises(AssertionError, match="offline device"):
        never(X, Y)
    with pytest.raises(AssertionError, match="attach to an offline device"):
        never.attachToDevice()
    never.destroy()

    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        lazy = wrapped(options().connectionType(ConnectionType.OnDemand))
        lazy.compile(X, Y)
    text = caplog.text
    assert text.index("Program:") < text.index("Acquired 1 IPU(s)")
    assert torch.isfinite(lazy(X, Y))


def test_a_replica_needs_a_device_of_its_own() -> None:
    opts = options(replicas=2).useIpuId(0)
    with pytest.raises(poptorch.Error, match="Expected at least replication factor"):
        poptorch.inferenceModel(lambda x: x + 1, opts)(torch.ones(2))


@pytest.mark.spec("programs", 24)
@pytest.mark.parametrize("destroyed", [False, True])
def test_there_is_nothing_before_compiling_and_after_destroy(destroyed: bool) -> None:
    training = wrapped()
    if destroyed:
        training(X, Y)
        training.destroy()
    for use in (
        training.copyWeightsToHost, training.copyWeightsToDevice, training.plan,
        training.attachToDevice, training.detachFromDevice, lambda: training.rng_state,
    ):  # fmt: skip
        with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
            use()


def test_the_simulated_device_needs_no_lease(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        wrapper = poptorch.inferenceModel(lambda x: x, options().useIpuModel(True))
        wrapper(X)
    assert "running on IPU model with 1472 tiles" in caplog.text
    counting = poptorch.inferenceModel(lambda x: x, options().useIpuModel(True).logCycleCount(True))
    with pytest.raises(poptorch.Error, match="cycle"):
        counting(X)


@pytest.mark.spec("executor", 56)
def test_random_state() -> None:
    dropout, ones = nn.Dropout(0.5).train(), torch.ones(64)
    wrapper, again = (
        poptorch.inferenceModel(dropout, options(iterations=2).randomSeed(7)) for _ in range(2)
    )
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        _ = wrapper.rng_state
    wrapper.compile(ones)
    assert wrapper.rng_state == [7]
    first = wrapper(ones)
    assert not torch.equal(first[:32], first[32:])  # new numbers at every micro-step
    state = wrapper.rng_state
    second = wrapper(ones)
    assert not torch.equal(first, second)
    wrapper.rng_state = state
    assert torch.equal(wrapper(ones), second)
    wrapper.rng_state = [7]
    assert torch.equal(wrapper(ones), first)
    wrapper.detachFromDevice()
    assert wrapper.rng_state == state
    assert torch.equal(wrapper(ones), second)
    with pytest.raises(ValueError, match="no state of the device"):
        wrapper.rng_state = [1, 2, 3]
    torch.rand(1)  # the host's sequence is another one
    assert torch.equal(again(ones), first)
    torch.manual_seed(7)
    assert not torch.equal(torch.cat([dropout(ones[:32]), dropout(ones[32:])]), first)


def test_no_seed_is_not_deterministic_and_replicas_draw_different_numbers() -> None:
    dropout, ones = nn.Dropout(0.5).train(), torch.ones(512)
    wrappers = [inference(dropout, replicas=2) for _ in range(2)]
    for wrapper in wrappers:
        wrapper.compile(ones)
        assert wrapper.rng_state is None
    first, second = (wrapper(ones) for wrapper in wrappers)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:256], first[256:])


@pytest.mark.spec("executor", 46)
def test_synthetic_data() -> None:
    opts = options(iterations=2).enableSyntheticData(True)
    wrapper = poptorch.inferenceModel(lambda x, y: (x, y, x + y), opts)
    got = wrapper(torch.ones(2), torch.ones(2))[2]
    assert got.shape == (2,)
    assert not torch.equal(got, torch.full((2,), 2.0))
    counters = wrapper.getPerfCounters()  # an entry for each tensor, without stamps
    assert counters["input"] == counters["input_complete"] == [[], []]
    assert counters["output"] == counters["output_complete"] == [[], [], []]
    for latency in (wrapper.getLatency, wrapper.getHostIpuLatency, wrapper.getComputeLatency):
        assert latency() == (0.0, 0.0, 0.0)


def test_a_plan_can_be_asked_for_while_the_weights_are_on_the_device() -> None:
    """A loss that has a weight of its own makes forward read one while it is captured again."""

    class WithLoss(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loss = nn.Linear(4, 4), nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.layer(self.first(x)), y)

    opts = options()
    opts.Training.gradientAccumulation(2)
    training, target = wrapped(opts, WithLoss()), Y.argmax(1)
    before = training(X, target)
    assert training.plan().program.lanes is not None
    assert training(X, target).sum() < before.sum()
