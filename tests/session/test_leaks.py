"""Long runs keep nothing: tensors, executors, memory."""

import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Regression as Net
from helpers.wrapping import normal, options

UNKNOWN = not Path("/proc/self/statm").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(UNKNOWN, reason="nothing says what is resident")]
X, Y = normal(8, 64), normal(8, 64, seed=1)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_class_that_reaches_its_executor_goes() -> None:
    """As a script's classes do, by the script's variables, when it has run or a cell runs again."""

    class Own(Net): ...

    Own.executor = poptorch.trainingModel(Own(64, 64), options())
    Own.executor(X, Y)
    kept = weakref.ref(Own)
    del Own
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_detached_model_and_its_optimizer_have_each_moment_once(library) -> None:
    def storages(size: int) -> set[int]:
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
        return {each.data_ptr() for each in found if each.untyped_storage().nbytes() == 4 * size}

    before = storages(61 * 67)
    model = Net(61, 67)
    training = poptorch.trainingModel(model, options(), library.Adam(model.parameters(), lr=0.001))
    for _ in range(2):
        training(normal(8, 61), normal(8, 67))
        training.detachFromDevice()
        assert len(storages(61 * 67) - before) == 3, "a weight and two moments"


def test_training_wrapping_and_destroying_keep_nothing() -> None:
    """A tenth of the length that the limit of 2 % is meant for, so a tenth of the growth."""
    model = Net(64, 64)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.001)
    training = poptorch.trainingModel(model, options(accumulation=2), optimizer)

    def some() -> None:
        for _ in range(50):
            training(X, Y)
        training.setOptimizer(optimizer)
        optimizer.state_dict()  # keeps one copy of the state
        model.state_dict()
        other = Net(64, 64)
        others = [poptorch.trainingModel(other, options())]
        others.append(poptorch.inferenceModel(other, options()))
        for each in others:
            each(X, Y)
        others[0].detachFromDevice()
        others[0].destroy()

    for _ in range(5):
        some()
    tensors, before = live_tensors(), resident()
    for _ in range(20):
        some()
    assert live_tensors() <= tensors
    assert resident() <= before * 1.02
