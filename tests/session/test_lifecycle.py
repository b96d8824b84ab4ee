"""Attach, detach, devices held and given back, forks, threads, and that nothing is kept."""

import contextlib
import copy
import gc
import logging
import random
import resource
import threading
import weakref
from concurrent import futures
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.cases import few
from helpers.closeness import near
from helpers.wrapping import Calling, Having, Twins, inference, normal, options
from helpers.wrapping import Regression as Net
from helpers.wrapping import training as wrapped

X, Y = normal(4, 4), normal(4, 2, seed=1)


@pytest.mark.parametrize("method", ["compile", "__call__"])
def test_a_default_device_of_the_caller_changes_nothing(method) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), Net(2, 2))
    twin = copy.deepcopy(model)
    opts = options(accumulation=2).randomSeed(3)
    executor, expected = (
        poptorch.trainingModel(m, opts, torch.optim.Adam(m.parameters(), lr=0.1), nn.MSELoss())
        for m in (model, twin)
    )

    with torch.device("meta"):
        getattr(executor, method)(X, Y)
    getattr(expected, method)(X, Y)
    executor(X, Y)
    expected(X, Y)

    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.spec("executor", 41)
@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
def test_attach_detach_and_destroy() -> None:
    model = Calling(lambda x, y: poptorch.identity_loss((model.layer(x) - y).square(), "mean"))
    model.layer = torch.nn.Linear(4, 2)
    training = wrapped(model)
    assert training.layer is training.model.layer
    before = []
    handle = poptorch.registerPreCompileHook(lambda: before.append(training.isCompiled()))
    for _ in range(2):
        assert not training.isAttachedToDevice()
        for use in (
            training.copyWeightsToHost,
            training.copyWeightsToDevice,
            training.plan,
            training.attachToDevice,
            training.detachFromDevice,
            lambda: training.rng_state,
        ):
            with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
                use()
        weight = model.layer.weight.detach().clone()
        training.compile(X + 7, Y)  # with made-up inputs trains nothing
        assert torch.equal(model.layer.weight, weight)
        with pytest.raises(poptorch.Error, match="Device is already attached"):
            training.attachToDevice()
        training.detachFromDevice()
        assert not training.isAttachedToDevice()
        with pytest.raises(poptorch.Error, match="Device is not attached"):
            training.detachFromDevice()
        training.copyWeightsToHost()  # nothing to do, and no harm
        expected = model(X, Y).detach()
        torch.testing.assert_close(training(X, Y), expected)  # attaches by itself
        assert training.isAttachedToDevice()
        assert not torch.equal(model.layer.weight, weight)
        training.destroy()
    handle.remove()
    assert before == [False, False]
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


@pytest.mark.spec("executor", 64)
@pytest.mark.spec("programs", 16)
def test_inference_gets_the_last_weights_and_the_device_of_a_trainer_that_is_gone() -> None:
    model = Net()
    training = wrapped(model, options().useIpuId(2))
    validation = poptorch.inferenceModel(model, options().useIpuId(2))
    before = validation(X)
    validation.detachFromDevice()
    training(X, Y)
    training.destroy()
    after = validation(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(X).detach())
    torch.nn.init.zeros_(model.layer.weight)
    assert torch.equal(validation(X), after)  # only once


@pytest.mark.spec("programs", 17, 18, 21, 30)
@pytest.mark.spec("runtime", 33)
def test_connection_types(caplog, tmp_path) -> None:
    half, x, y = Net().half(), X.half(), Y.half()
    mode = poptorch.OutputMode["All"]
    assert mode is poptorch.OutputMode.All is getattr(poptorch.OutputMode, mode.name)
    opts = options().useOfflineIpuTarget().outputMode(mode)
    opts.enableExecutableCaching(str(tmp_path / "not" / "there")).enableExecutableCaching(None)
    never = wrapped(half, opts.connectionType(poptorch.ConnectionType.Never))
    never.compile(x, y)
    assert never.isCompiled()
    assert not never.isAttachedToDevice()
    assert never.getTensorNames()
    with pytest.raises(AssertionError, match="offline device"):
        never(x, y)
    with pytest.raises(AssertionError, match="attach to an offline device"):
        never.attachToDevice()
    never.destroy()
    assert {value.dtype for value in half.state_dict().values()} == {torch.float16}
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        lazy = wrapped(Net(), options().connectionType(poptorch.ConnectionType.OnDemand))
        lazy.compile(X, Y)
    text = caplog.text
    assert text.index("Program:") < text.index("Acquired 1 IPU(s)")
    assert torch.isfinite(lazy(X, Y))


@pytest.mark.spec("executor", 56)
def test_random_state() -> None:
    dropout, ones = torch.nn.Dropout(0.5).train(), torch.ones(64)
    opts = options(iterations=2).randomSeed(7)
    wrapper, again = (poptorch.inferenceModel(dropout, opts) for _ in range(2))
    wrapper.compile(ones)
    assert wrapper.rng_state == [7]
    first = wrapper(ones)
    assert not torch.equal(first[:32], first[32:])  # new numbers at every micro-step
    state, second = wrapper.rng_state, wrapper(ones)
    for set_to, expected in ((state, second), ([7], first)):
        wrapper.rng_state = set_to
        assert torch.equal(wrapper(ones), expected)
    wrapper.detachFromDevice()
    assert wrapper.rng_state == state
    assert torch.equal(wrapper(ones), second)
    with pytest.raises(ValueError, match="not a state of the device"):
        wrapper.rng_state = [1, 2, 3]
    torch.manual_seed(7)  # the host's sequence is another one
    assert torch.equal(again(ones), first)
    assert not torch.equal(torch.cat([dropout(ones[:32]), dropout(ones[32:])]), first)
    attention = inference(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    attention(ones.view(1, 1, 8, 8))
    state = attention.rng_state
    attention(ones.view(1, 1, 8, 8))  # torch marks it random: without a dropout it draws nothing
    assert attention.rng_state == state
    unseeded = inference(dropout, replicas=2)
    unseeded.compile(ones)
    assert unseeded.rng_state is None
    drawn = unseeded(ones)
    assert not torch.equal(drawn, inference(dropout, replicas=2)(ones))
    assert not torch.equal(drawn[:32], drawn[32:])  # replicas draw different numbers


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
    model = Calling(lambda x, y: model.loss(model.layer(x), y))
    model.layer, model.loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(torch.ones(2))
    training, target = wrapped(model, options(accumulation=2)), Y.argmax(1)
    before = training(X, target)
    assert training.plan().program.lanes is not None
    assert training(X, target).sum() < before.sum()


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
    assert "forked from a process whose operators ran on several threads" in run.stderr


A, B = torch.randn(4, 3), torch.randn(4, 2)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@contextlib.contextmanager
def beside(*functions):
    """Call each function again and again in a thread of its own; what one raises is raised."""
    ended, begun = threading.Event(), threading.Barrier(len(functions) + 1)

    def loop(function) -> None:
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


def documented(function):
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
    twins = Twins(
        with_loss(layers(), nn.functional.mse_loss),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        options(tier),
        **near(8, 10, size=0.1),
    )
    model, executor, ours = twins.model, twins.wrapped, twins.ours
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

    def method(draw: random.Random):
        return lambda: documented(draw.choice(methods if draw.random() < 0.99 else rare))()

    with beside(*map(method, draws)):
        twins.step(A, B, count=100)
    twins.compare()
    torch.testing.assert_close(validation(A), model.inner(A))


def with_loss(inner: nn.Module, loss) -> nn.Module:
    return Having(lambda m, x, *rest: loss(m.inner(x), *rest), inner=inner)


def test_two_trainers_of_common_weights_wait_for_one_another() -> None:
    """Each thread locks both, in one order."""
    model = layers()
    squared = with_loss(model[0], lambda x: poptorch.identity_loss(x.pow(2), "mean"))
    both = with_loss(model, nn.functional.mse_loss), squared
    executors = [poptorch.trainingModel(each, options()) for each in both]
    for executor, arguments in zip(executors, ((A, B), (A,)), strict=True):
        executor(*arguments)
    with beside(lambda: executors[1](A), model.state_dict):
        for _ in range(50):
            executors[0](A, B)
    assert all(value.isfinite().all() for value in model.state_dict().values())


RESIDENT = Path("/proc/self/statm")
INPUT, TARGET = normal(8, 64), normal(8, 64, seed=1)


def resident() -> int:
    gc.collect()
    return int(RESIDENT.read_text().split()[1]) * resource.getpagesize()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_a_class_that_reaches_its_executor_goes() -> None:
    """As a script's classes do, by the script's variables, when it has run or a cell runs again."""

    class Own(Net): ...

    Own.executor = poptorch.trainingModel(Own(64, 64), options())
    Own.executor(INPUT, TARGET)
    kept = weakref.ref(Own)
    del Own
    gc.collect()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_detached_model_and_its_optimizer_have_each_moment_once(library) -> None:
    def storages(size: int) -> set[int]:
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
        return {each.data_ptr() for each in found if each.untyped_storage().nbytes() == 4 * size}

    before, model = storages(61 * 67), Net(61, 67)
    training = poptorch.trainingModel(model, options(), library.Adam(model.parameters(), lr=0.001))
    for _ in range(2):
        training(normal(8, 61), normal(8, 67))
        training.detachFromDevice()
        assert len(storages(61 * 67) - before) == 3, "a weight and two moments"


@pytest.mark.slow
@pytest.mark.skipif(not RESIDENT.exists(), reason="nothing says what is resident")
def test_training_wrapping_and_destroying_keep_nothing() -> None:
    """A tenth of the length that the limit of 2 % is meant for, so a tenth of the growth."""
    model = Net(64, 64)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.001)
    training = poptorch.trainingModel(model, options(accumulation=2), optimizer)

    def some() -> None:
        for _ in range(50):
            training(INPUT, TARGET)
        training.setOptimizer(optimizer)
        optimizer.state_dict()  # keeps one copy of the state
        model.state_dict()
        other = Net(64, 64)
        others = [poptorch.trainingModel(other, options())]
        others.append(poptorch.inferenceModel(other, options()))
        for each in others:
            each(INPUT, TARGET)
        others[0].detachFromDevice()
        others[0].destroy()

    for _ in range(5):
        some()
    tensors, before = live_tensors(), resident()
    for _ in range(20):
        some()
    assert live_tensors() <= tensors
    assert resident() <= before * 1.02


@pytest.mark.skipif(not RESIDENT.exists(), reason="nothing says what is resident")
def test_what_a_program_freed_is_given_back_when_it_is_destroyed() -> None:
    chain = nn.Sequential(nn.Linear(1, 1), *(nn.Tanh() for _ in range(20)))
    model = with_loss(chain, lambda y: poptorch.identity_loss(y, "mean"))
    for _ in range(2):  # the first gives back what others freed
        training, before = poptorch.trainingModel(model, options()), resident()
        training(torch.ones(1 << 22, 1))
        kept = resident() - before
        training.destroy()
    assert resident() - before < 50 << 20 < kept / 6
