"""Threads beside training see the state between two calls; a forked process says so."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.cases import few
from helpers.closeness import near
from helpers.twins import Twins
from helpers.wrapping import Having, options

X, Y = torch.randn(4, 3), torch.randn(4, 2)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


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


@pytest.mark.slow
@pytest.mark.parametrize("tier", few(["reference", "inductor"], "reference"))
def test_random_methods_of_three_threads_beside_training(tier: str) -> None:
    """The weights are those of the same calls one after another."""
    twins = Twins(with_loss(layers(), nn.functional.mse_loss),
                  lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), options(tier),
                  **near(8, 10, size=0.1))  # fmt: skip
    model, executor, ours = twins.model, twins.wrapped, twins.ours
    validation = poptorch.inferenceModel(model.inner, options(tier))
    methods: list[Callable[[], object]] = [
        model.state_dict, ours.state_dict, executor.isCompiled, executor.copyWeightsToHost,
        executor.copyWeightsToHostIfNeeded, executor.plan, executor.getPerfCounters,
        executor.detachFromDevice, executor.attachToDevice, lambda: executor.rng_state,
        lambda: executor.setOptimizer(ours), lambda: executor.compile(X, Y),
        lambda: validation(X), validation.detachFromDevice, lambda: repr(executor),
        lambda: executor.inner[0].weight.sum(),
    ]  # fmt: skip
    rare = [executor.destroy, validation.destroy]
    draws = [random.Random(seed) for seed in range(3)]

    def method(draw: random.Random) -> Callable[[], None]:
        return lambda: documented(draw.choice(methods if draw.random() < 0.99 else rare))()

    with beside(*map(method, draws)):
        twins.step(X, Y, count=100)
    twins.compare()
    torch.testing.assert_close(validation(X), model.inner(X))


def with_loss(inner: nn.Module, loss: Callable[..., torch.Tensor]) -> nn.Module:
    return Having(lambda m, x, *rest: loss(m.inner(x), *rest), inner=inner)


def test_two_trainers_of_common_weights_wait_for_one_another() -> None:
    """Each thread locks both, in one order."""
    model = layers()
    squared = with_loss(model[0], lambda x: poptorch.identity_loss(x.pow(2), "mean"))
    both = with_loss(model, nn.functional.mse_loss), squared
    executors = [poptorch.trainingModel(each, options()) for each in both]
    for executor, arguments in zip(executors, ((X, Y), (X,)), strict=True):
        executor(*arguments)
    with beside(lambda: executors[1](X), model.state_dict):
        for _ in range(50):
            executors[0](X, Y)
    assert all(value.isfinite().all() for value in model.state_dict().values())


PROGRAM = """
import os, sys, threading, torch, poptorch
from poptorch._residency import cells
torch.set_num_threads(2)
options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
model = torch.nn.Linear(512, 512)
wrapper = poptorch.inferenceModel(model, options)
x = torch.randn(512, 512)
expected = wrapper(x)
for _ in range(8):  # both numbers of threads are tried
    wrapper(x)
torch.mm(x, x)
held, ended = threading.Event(), threading.Event()

def hold():  # as a thread that wraps a model while it is in a call of this one
    with wrapper._session.lock(), cells._making.now:
        held.set()
        ended.wait()

threading.Thread(target=hold).start()
held.wait()
if os.fork() == 0:
    try:
        wrapper(x)
    except RuntimeError as error:
        print("refused", "before this process was forked" in str(error), flush=True)
    again = poptorch.inferenceModel(model, options.clone())
    rounded = 512**0.5 * torch.finfo(x.dtype).eps
    print("equal", torch.allclose(again(x), expected, atol=rounded), flush=True)
    print("threads", torch.get_num_threads(), flush=True)
    os._exit(0)
os.wait()
ended.set()
print("parent", torch.equal(wrapper(x), wrapper(x)))
"""


@pytest.mark.slow
def test_a_forked_process_says_so_and_runs_what_is_new() -> None:
    run = programs.run("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    expected = ["refused", "True", "equal", "True", "threads", "1", "parent", "True"]
    assert run.stdout.split() == expected
    assert "forked from one whose operators ran on several threads" in run.stderr
