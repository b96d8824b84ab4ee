"""What is gone gives its memory back: models, programs and optimizers."""

import gc
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from helpers.wrapping import Regression as Net

RESIDENT = Path("/proc/self/statm")
INPUT, TARGET = normal(8, 64), normal(8, 64, seed=1)


def with_loss(inner: nn.Module, loss: Callable[..., torch.Tensor]) -> nn.Module:
    """Return a model that returns a loss of the inner one's result."""
    return Having(lambda m, x: loss(m.inner(x)), inner=inner)


def resident() -> int:
    """Return the bytes of memory that this process has."""
    gc.collect()
    return int(RESIDENT.read_text().split()[1]) * resource.getpagesize()


def live_tensors() -> int:
    """Return how many tensors there are."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.slow
def test_a_class_with_a_reference_to_its_executor_is_collected() -> None:
    """Classes of a script refer to executors through its variables, also if a cell runs again."""

    class SelfReferring(Net): ...

    SelfReferring.executor = poptorch.trainingModel(SelfReferring(64, 64), options())
    SelfReferring.executor(INPUT, TARGET)
    kept = weakref.ref(SelfReferring)
    del SelfReferring
    gc.collect()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_detached_model_and_its_optimizer_have_each_moment_once(library: ModuleType) -> None:
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


@pytest.mark.larger("test_destroying_a_program_returns_its_freed_memory")
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
def test_destroying_a_program_returns_its_freed_memory() -> None:
    chain = nn.Sequential(nn.Linear(1, 1), *(nn.Tanh() for _ in range(20)))
    model = with_loss(chain, lambda y: poptorch.identity_loss(y, "mean"))
    for _ in range(2):  # the first gives back what others freed
        training, before = poptorch.trainingModel(model, options()), resident()
        training(torch.ones(1 << 22, 1))
        kept = resident() - before
        training.destroy()
    assert resident() - before < 50 << 20 < kept / 6
