"""Threads beside training: every public method sees the state between two calls."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

X, Y = torch.randn(4, 3), torch.randn(4, 2)
TIERS = ["reference", pytest.param("inductor", marks=pytest.mark.slow)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y=None):
        out = self.second(torch.tanh(self.first(x)))
        return out if y is None else nn.functional.mse_loss(out, y)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrapped(tier: str) -> tuple[Net, poptorch.PoplarExecutor]:
    model = Net()
    return model, poptorch.trainingModel(model, options(tier), optimizer(model))


def eager(steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps on the one batch."""
    model = Net()
    updates = optimizer(model)
    for _ in range(steps):
        updates.zero_grad()
        model(X, Y).backward()
        updates.step()
    return model.state_dict()


def check(model: nn.Module, steps: int) -> None:
    for name, value in eager(steps).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def beside(*functions: Callable[[], object]) -> Iterator[None]:
    """Call each function again and again in a thread of its own; what one raises is raised."""
    ended = threading.Event()
    begun = threading.Barrier(len(functions) + 1)

    def loop(function: Callable[[], object]) -> None:
        begun.wait()
        while not ended.is_set():
            function()

    with futures.ThreadPoolExecutor(len(functions)) as threads:
        running = [threads.submit(loop, each) for each in functions]
        begun.wait()
        try:
            yield
        finally:
            ended.set()
    for each in running:
        each.result()


def documented(function: Callable[[], object]) -> Callable[[], None]:
    """A call that may come while the model is not compiled, attached, or is attached already."""

    def call() -> None:
        try:
            function()
        except poptorch.Error as error:
            told = ("not been compiled", "not attached", "attached already", "already attached")
            assert any(text in str(error) for text in told), error  # noqa: PT017

    return call


@pytest.mark.parametrize("tier", TIERS)
def test_weights_read_in_another_thread_leave_the_host_right(tier: str) -> None:
    model, executor = wrapped(tier)
    executor(X, Y)
    for calls in range(1, 41):
        with beside(model.state_dict):
            executor(X, Y)
        check(model, calls + 1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("method", ["compile", "destroy", "detachFromDevice"])
def test_another_thread_that_compiles_or_takes_the_device_loses_no_update(
    tier: str, method: str
) -> None:
    model, executor = wrapped(tier)
    arguments = (X, Y) if method == "compile" else ()
    with beside(documented(lambda: getattr(executor, method)(*arguments))):
        for _ in range(8):
            executor(X, Y)
    check(model, 8)


@pytest.mark.parametrize("tier", TIERS)
def test_random_methods_of_three_threads_beside_training(tier: str) -> None:
    """The weights are those of the same calls one after another."""
    model, executor = wrapped(tier)
    ours = executor._optimizer
    validation = poptorch.inferenceModel(model, options(tier))
    assert ours is not None
    methods: list[Callable[[], object]] = [
        model.state_dict, ours.state_dict, executor.isCompiled, executor.copyWeightsToHost,
        executor.copyWeightsToHostIfNeeded, executor.plan, executor.getPerfCounters,
        executor.detachFromDevice, executor.attachToDevice, lambda: executor.rng_state,
        lambda: executor.setOptimizer(ours), lambda: executor.compile(X, Y),
        lambda: validation(X), validation.detachFromDevice, lambda: repr(executor),
        lambda: executor.first.weight.sum(),
    ]  # fmt: skip
    rare = [executor.destroy, validation.destroy]
    draws = [random.Random(seed) for seed in range(3)]

    def method(draw: random.Random) -> Callable[[], None]:
        return lambda: documented(draw.choice(methods if draw.random() < 0.99 else rare))()

    calls = 200 if tier == "reference" else 50
    with beside(*map(method, draws)):
        for _ in range(calls):
            executor(X, Y)
    check(model, calls)
    torch.testing.assert_close(validation(X), model.eval()(X))


def test_two_trainers_of_common_weights_wait_for_one_another() -> None:
    """Each thread locks both, in one order."""
    model = Net()
    executors = [
        poptorch.trainingModel(layers, options(), torch.optim.SGD(layers.parameters(), lr=0.01))
        for layers in (model, nn.Sequential(model.first, Loss()))
    ]
    for executor, arguments in zip(executors, ((X, Y), (X,)), strict=True):
        executor(*arguments)
    with beside(lambda: executors[1](X), model.state_dict):
        for _ in range(50):
            executors[0](X, Y)
    assert all(value.isfinite().all() for value in model.state_dict().values())


class Loss(nn.Module):
    def forward(self, x):
        return poptorch.identity_loss(x.pow(2).mean(), reduction="none")
