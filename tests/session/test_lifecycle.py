"""Attach, detach and destroy; connections, synthetic data, and processes that fork."""

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.wrapping import Calling, normal, options
from helpers.wrapping import Regression as Net
from helpers.wrapping import training as wrapped

X, Y = normal(4, 4), normal(4, 2, seed=1)


@pytest.mark.parametrize("method", ["compile", "__call__"])
def test_a_default_device_of_the_caller_changes_nothing(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), Net(2, 2))
    eager_model = copy.deepcopy(model)
    opts = options(accumulation=2).randomSeed(3)
    executor, expected = (
        poptorch.trainingModel(m, opts, torch.optim.Adam(m.parameters(), lr=0.1), nn.MSELoss())
        for m in (model, eager_model)
    )

    with torch.device("meta"):
        getattr(executor, method)(X, Y)
    getattr(expected, method)(X, Y)
    executor(X, Y)
    expected(X, Y)

    torch.testing.assert_close(model.state_dict(), eager_model.state_dict(), rtol=0, atol=0)


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Return the generations that are collected from now on, with Python's usual thresholds."""
    found: list[int] = []
    before = gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_garbage_is_collected_after_a_compilation_and_not_during_it(collections: list[int]) -> None:
    """Also while the optimizer's step is traced, which precedes the passes."""
    model = Net(4, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    executor = poptorch.trainingModel(model, options(), optimizer)
    collections.clear()

    executor.compile(X, Y)

    assert len(collections) <= 1


def with_a_layer() -> Calling:
    """Return a model whose loss is the mean of squared errors."""
    model = Calling(lambda x, y: poptorch.identity_loss((model.layer(x) - y).square(), "mean"))
    model.layer = torch.nn.Linear(4, 2)
    return model


@pytest.mark.spec("executor", 41)
def test_layers_of_the_model_are_attributes_of_the_executor() -> None:
    training = wrapped(with_a_layer())

    assert training.layer is training.model.layer


# What needs a program.
NEEDS_A_PROGRAM: dict[str, Callable[[poptorch.PoplarExecutor], object]] = {
    "copyWeightsToHost": lambda executor: executor.copyWeightsToHost(),
    "copyWeightsToDevice": lambda executor: executor.copyWeightsToDevice(),
    "plan": lambda executor: executor.plan(),
    "attachToDevice": lambda executor: executor.attachToDevice(),
    "detachFromDevice": lambda executor: executor.detachFromDevice(),
    "rng_state": lambda executor: executor.rng_state,
}
each_that_needs_a_program = pytest.mark.parametrize(
    "use", NEEDS_A_PROGRAM.values(), ids=NEEDS_A_PROGRAM
)


@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
@each_that_needs_a_program
def test_a_model_that_is_not_compiled_has_no_program(
    use: Callable[[poptorch.PoplarExecutor], object],
) -> None:
    training = wrapped(with_a_layer())

    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
        use(training)


@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
@each_that_needs_a_program
def test_a_model_that_was_destroyed_has_no_program(
    use: Callable[[poptorch.PoplarExecutor], object],
) -> None:
    training = wrapped(with_a_layer())
    training.compile(X, Y)

    training.destroy()

    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
        use(training)


@pytest.mark.spec("executor", 41)
def test_compiling_with_made_up_inputs_trains_nothing() -> None:
    model = with_a_layer()
    before = model.layer.weight.detach().clone()

    wrapped(model).compile(X + 7, Y)

    assert torch.equal(model.layer.weight, before)


@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
def test_compiling_attaches_and_attaching_twice_is_refused() -> None:
    training = wrapped(with_a_layer())
    training.compile(X, Y)

    with pytest.raises(poptorch.Error, match="Device is already attached"):
        training.attachToDevice()

    assert training.isAttachedToDevice()


@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
def test_detaching_twice_is_refused() -> None:
    training = wrapped(with_a_layer())
    training.compile(X, Y)

    training.detachFromDevice()

    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        training.detachFromDevice()


@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
def test_copying_to_the_host_does_nothing_for_a_detached_model() -> None:
    model = with_a_layer()
    training = wrapped(model)
    training(X, Y)
    training.detachFromDevice()
    before = model.layer.weight.detach().clone()

    training.copyWeightsToHost()

    assert torch.equal(model.layer.weight, before)


@pytest.mark.spec("executor", 41)
@pytest.mark.spec("programs", 4, 7, 15, 24, 27, 29)
def test_a_call_of_a_detached_model_attaches_and_trains() -> None:
    model = with_a_layer()
    training = wrapped(model)
    training.compile(X, Y)
    training.detachFromDevice()
    before = model.layer.weight.detach().clone()
    expected = model(X, Y).detach()

    loss = training(X, Y)

    torch.testing.assert_close(loss, expected)
    assert training.isAttachedToDevice()
    assert not torch.equal(model.layer.weight, before)


@pytest.mark.spec("executor", 41)
def test_a_model_can_be_compiled_again_after_destroy() -> None:
    model = with_a_layer()
    training = wrapped(model)
    training(X, Y)
    training.destroy()
    expected = model(X, Y).detach()

    torch.testing.assert_close(training(X, Y), expected)


@pytest.mark.spec("executor", 41)
def test_a_hook_is_called_before_each_compilation() -> None:
    training, compiled = wrapped(with_a_layer()), list[bool]()
    handle = poptorch.registerPreCompileHook(lambda: compiled.append(training.isCompiled()))

    for _ in range(2):
        training.compile(X, Y)
        training.destroy()
    handle.remove()
    training.compile(X, Y)

    assert compiled == [False, False]


@pytest.mark.spec("executor", 41)
def test_a_hook_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


@pytest.mark.spec("executor", 64)
@pytest.mark.spec("programs", 16)
def test_inference_gets_the_last_weights_and_the_device_of_a_collected_trainer() -> None:
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
def test_output_modes_can_be_found_by_name() -> None:
    mode = poptorch.OutputMode["All"]

    assert mode is poptorch.OutputMode.All
    assert getattr(poptorch.OutputMode, mode.name) is mode


@pytest.fixture
def offline(tmp_path: Path) -> poptorch.PoplarExecutor:
    """Return a model in half precision that is compiled for a device that is not there."""
    opts = options().useOfflineIpuTarget().connectionType(poptorch.ConnectionType.Never)
    # A folder that is not there is no obstacle, as caching is switched off again.
    opts.enableExecutableCaching(str(tmp_path / "not" / "there")).enableExecutableCaching(None)
    never = wrapped(Net().half(), opts)
    never.compile(X.half(), Y.half())
    return never


@pytest.mark.spec("programs", 17, 18, 21, 30)
@pytest.mark.spec("runtime", 33)
def test_a_model_without_a_connection_is_compiled_and_not_attached(
    offline: poptorch.PoplarExecutor,
) -> None:
    assert offline.isCompiled()
    assert not offline.isAttachedToDevice()
    assert offline.getTensorNames()


@pytest.mark.spec("programs", 17, 18, 21, 30)
@pytest.mark.spec("runtime", 33)
def test_a_model_without_a_connection_cannot_be_called_or_attached(
    offline: poptorch.PoplarExecutor,
) -> None:
    with pytest.raises(AssertionError, match="offline device"):
        offline(X.half(), Y.half())
    with pytest.raises(AssertionError, match="attach to an offline device"):
        offline.attachToDevice()


@pytest.mark.spec("programs", 17, 18, 21, 30)
def test_a_model_without_a_connection_keeps_the_types_of_its_weights(
    offline: poptorch.PoplarExecutor,
) -> None:
    offline.destroy()

    kinds = {value.dtype for value in offline.model.state_dict().values()}
    assert kinds == {torch.float16}


@pytest.mark.spec("programs", 17, 18, 21, 30)
@pytest.mark.spec("runtime", 33)
def test_a_connection_on_demand_is_made_after_compiling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        lazy = wrapped(Net(), options().connectionType(poptorch.ConnectionType.OnDemand))
        lazy.compile(X, Y)

    assert caplog.text.index("Program:") < caplog.text.index("Acquired 1 IPU(s)")
    assert torch.isfinite(lazy(X, Y))


@pytest.fixture
def synthetic() -> poptorch.PoplarExecutor:
    """Return a sum with synthetic data, after a call with ones."""
    opts = options(iterations=2).enableSyntheticData(True)
    return poptorch.inferenceModel(lambda x, y: (x, y, x + y), opts)


@pytest.mark.spec("executor", 46)
def test_with_synthetic_data_results_have_their_shapes_and_not_their_values(
    synthetic: poptorch.PoplarExecutor,
) -> None:
    _, _, total = synthetic(torch.ones(2), torch.ones(2))

    assert total.shape == (2,)
    assert not torch.equal(total, torch.full((2,), 2.0))


@pytest.mark.spec("executor", 46)
def test_with_synthetic_data_counters_have_an_entry_for_each_tensor_and_no_stamps(
    synthetic: poptorch.PoplarExecutor,
) -> None:
    synthetic(torch.ones(2), torch.ones(2))

    counters = synthetic.getPerfCounters()

    assert counters["input"] == [[], []]
    assert counters["input_complete"] == [[], []]
    assert counters["output"] == [[], [], []]
    assert counters["output_complete"] == [[], [], []]


@pytest.mark.spec("executor", 46)
@pytest.mark.parametrize("latency", ["getLatency", "getHostIpuLatency", "getComputeLatency"])
def test_with_synthetic_data_all_latencies_are_zero(
    synthetic: poptorch.PoplarExecutor, latency: str
) -> None:
    synthetic(torch.ones(2), torch.ones(2))

    assert getattr(synthetic, latency)() == (0.0, 0.0, 0.0)


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
def test_a_forked_process_refuses_old_programs_and_runs_new_ones() -> None:
    run = programs.run("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    expected = ["refused", "True", "equal", "True", "threads", "1", "parent", "True"]
    assert run.stdout.split() == expected
    assert "forked from a process whose operators ran on several threads" in run.stderr
