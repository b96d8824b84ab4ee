"""Calls from several threads, of one model and of models with common weights."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import long
from helpers.closeness import near
from helpers.wrapping import EagerPair, Having, options

A, B = torch.randn(4, 3), torch.randn(4, 2)


def layers() -> nn.Sequential:
    """Return two layers with an activation between them."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def with_loss(inner: nn.Module, loss: Callable[..., torch.Tensor]) -> nn.Module:
    """Return a model that returns a loss of the inner one's result."""
    return Having(lambda m, x, *rest: loss(m.inner(x), *rest), inner=inner)


@contextlib.contextmanager
def running_concurrently(*functions: Callable[[], object]) -> Iterator[None]:
    """Call each function again and again in a thread of its own; what one raises is raised."""
    ended, begun = threading.Event(), threading.Barrier(len(functions) + 1)

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
    """Return a call that may come while the model is not compiled or not attached, or is."""

    def call() -> None:
        try:
            function()
        except poptorch.Error as error:
            allowed_errors = (
                "not been compiled",
                "not attached",
                "attached already",
                "already attached",
            )
            assert any(text in str(error) for text in allowed_errors), error  # noqa: PT017

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    "tier, steps", [("reference", 20), ("reference", 100), long("inductor", 100)]
)
def test_three_threads_can_call_random_methods_during_training(tier: str, steps: int) -> None:
    """The weights are those of the same calls one after another."""
    pair = EagerPair(
        with_loss(layers(), nn.functional.mse_loss),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        options(tier),
        **near(8, 10, size=0.1),
    )
    model, executor, ours = pair.model, pair.wrapped, pair.ours
    validation = poptorch.inferenceModel(model.inner, options(tier))
    methods = [
        model.state_dict,
        ours.state_dict,
        executor.isCompiled,
        executor.copyWeightsToHost,
        executor.copyWeightsToHostIfNeeded,
        executor.plan,
        executor.getPerfCounters,
        executor.detachFromDevice,
        executor.attachToDevice,
        lambda: executor.rng_state,
        lambda: executor.setOptimizer(ours),
        lambda: executor.compile(A, B),
        lambda: validation(A),
        validation.detachFromDevice,
        lambda: repr(executor),
        lambda: executor.inner[0].weight.sum(),
    ]
    rare = [executor.destroy, validation.destroy]
    draws = [random.Random(seed) for seed in range(3)]

    def method(draw: random.Random) -> Callable[[], None]:
        return lambda: documented(draw.choice(methods if draw.random() < 0.99 else rare))()

    with running_concurrently(*map(method, draws)):
        pair.step(A, B, count=steps)
    pair.compare()
    torch.testing.assert_close(validation(A), model.inner(A))


def test_two_trainers_of_common_weights_wait_for_each_other() -> None:
    """Each thread locks both, in one order."""
    model = layers()
    squared = with_loss(model[0], lambda x: poptorch.identity_loss(x.pow(2), "mean"))
    both = with_loss(model, nn.functional.mse_loss), squared
    executors = [poptorch.trainingModel(each, options()) for each in both]
    for executor, arguments in zip(executors, ((A, B), (A,)), strict=True):
        executor(*arguments)
    with running_concurrently(lambda: executors[1](A), model.state_dict):
        for _ in range(50):
            executors[0](A, B)
    assert all(value.isfinite().all() for value in model.state_dict().values())
