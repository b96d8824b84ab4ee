"""The optimizer of a wrapped model: when it is read, its state, checkpoints, replacements."""

from __future__ import annotations

import copy
import gc
import io
import logging

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import Regression as Net
from helpers.wrapped import normal, options

X, Y = normal(4, 4), normal(4, 2, seed=1)
WEIGHT = "Accl1___layer.weight"


def wrapped(model: Net, optimizer=None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options(), optimizer)


def adam(lr: float = 0.01):
    """A model, its optimizer, and the executor of both."""
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=lr)
    return model, optimizer, wrapped(model, optimizer)


def state_of(optimizer) -> dict[str, torch.Tensor]:
    return optimizer.state_dict()["ipu_state"]


def saved(value):
    """What comes out of a file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OPTIMIZERS = {
    "SGD": lambda p: poptorch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "combined": lambda p: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=3.0, weight_decay=0.07
    ),
    "Adam": lambda p: poptorch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: poptorch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.999), eps=1e-7),
    "RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01, max_weight_norm=3.3),
}


@pytest.mark.spec("optimizers", 19)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_from_a_checkpoint_continues_bit_for_bit(name: str) -> None:
    """At the rate that a scheduler had set."""
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    training = wrapped(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        training(X, Y)
    scheduler.step()
    training.setOptimizer(optimizer)
    checkpoint = saved({"model": model.state_dict(), "opt": optimizer.state_dict()})
    expected = [training(X, Y) for _ in range(4)]

    twin = Net()
    twin.load_state_dict(checkpoint["model"])
    fresh = OPTIMIZERS[name](twin.parameters())
    fresh.load_state_dict(checkpoint["opt"])
    again = wrapped(twin, fresh)
    assert [again(X, Y) for _ in range(4)] == expected
    assert torch.equal(twin.layer.weight, model.layer.weight)
    rate = optimizer.param_groups[0]["lr"]
    assert fresh.param_groups[0]["lr"] == rate
    # Rebuilt at epoch 1 it makes the step to epoch 2, from the stored rate.
    torch.optim.lr_scheduler.StepLR(fresh, 1, gamma=0.5, last_epoch=scheduler.last_epoch)
    assert fresh.param_groups[0]["lr"] == rate / 2


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
def test_state_is_none_until_compiled() -> None:
    model, optimizer, training = adam()
    state = optimizer.state_dict()
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    assert not optimizer.has_state()
    training.compile(X, Y)
    state = optimizer.state_dict()
    assert set(state["ipu_state"]) >= {WEIGHT, "Accl2___layer.bias"}
    assert not state["ipu_state"][WEIGHT].any()
    assert state["ipu_param"]["learningRate___specific___layer.weight"] == torch.tensor(0.01)
    native = torch.optim.Adam(model.parameters(), lr=0.5).state_dict()
    for wrong in (native, {**state, "ipu_state": 3}, {**native, "ipu_state": {}}):
        with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
            optimizer.load_state_dict(wrong)
    for empty in ({}, None):
        with pytest.raises(RuntimeError, match="because it is empty"):
            optimizer.load_state_dict(empty)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    assert not optimizer.ipu_state_is_dirty
    assert optimizer.state_dict() == state

    _, other, training = adam()
    other.load_state_dict({"ipu_state": None, "ipu_param": None, **native})  # torch's part only
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.ipu_state_is_dirty
    moved = {WEIGHT: state["ipu_state"][WEIGHT] + 0.5}
    other.load_state_dict({**state, "ipu_state": moved})
    training.compile(X, Y)  # nothing was, before
    assert (state_of(other)[WEIGHT] == 0.5).all()
    assert state_of(other).keys() == state["ipu_state"].keys()  # what is not loaded stays


@pytest.mark.spec("executor", 60)
@pytest.mark.spec("optimizers", 15, 17)
def test_partial_states_merge_when_they_are_used(caplog) -> None:
    _, optimizer, training = adam()
    training(X, Y)
    before = optimizer.state_dict()
    part = {WEIGHT: torch.full((2, 4), 7.0)}
    stranger = {"Accl1___other": torch.ones(7), "x": None}
    optimizer.load_state_dict({**before, "ipu_state": {**part, **stranger}})
    assert set(state_of(optimizer)) == {*part, *stranger}
    optimizer.param_groups[0]["lr"] = 0.0
    training.setOptimizer(optimizer)  # no weight moves: only the state is of interest
    training(X, Y)
    merged = state_of(optimizer)
    assert "lacks Accl2___layer.weight, Step___layer.weight, " in caplog.text
    assert set(merged) == set(before["ipu_state"])
    assert (merged[WEIGHT] > 5).all()
    assert (merged["Accl1___layer.bias"].abs() < 5).all()


@pytest.mark.spec("optimizers", 15)
def test_the_state_is_read_once(caplog) -> None:
    _, optimizer, training = adam()
    training(X, Y)
    assert optimizer.get_state_dict()["ipu_state"] is None
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        first = copy.deepcopy(state_of(optimizer))
        optimizer.state_dict()
    assert caplog.text.count("Writing optimiser state tensors from IPU to host") == 1
    kept = state_of(optimizer)
    training(X, Y)
    assert not torch.equal(state_of(optimizer)[WEIGHT], first[WEIGHT])
    assert torch.equal(kept[WEIGHT], first[WEIGHT])


@pytest.mark.spec("executor", 29, 34, 54, 69)
@pytest.mark.spec("optimizers", 1, 2)
@pytest.mark.spec("programs", 19)
@pytest.mark.parametrize("kind", [poptorch.optim.SGD, torch.optim.SGD])
def test_a_changed_rate_waits_for_set_optimizer(kind) -> None:
    """Of a scheduler, too."""
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    training = wrapped(model, optimizer)

    def step(rate: float) -> None:
        twin = copy.deepcopy(model)
        twin(X, Y).backward()
        training(X, Y)
        expected = twin.layer.weight.detach() - rate * twin.layer.weight.grad
        torch.testing.assert_close(model.layer.weight.detach(), expected)

    optimizer.param_groups[0]["lr"] = 0.0  # after wrapping: not seen
    step(0.1)
    training.setOptimizer(optimizer)
    step(0.0)
    optimizer.param_groups[0]["lr"] = 0.1
    training.setOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(0.1)
    scheduler.step()  # no warning about a step of the optimizer: the device made it
    step(0.1)
    training.setOptimizer(optimizer)
    step(0.05)


@pytest.mark.spec("executor", 33)
def test_a_replaced_optimizer_keeps_its_last_state() -> None:
    model = Net()
    first, second = (OPTIMIZERS["momentum"](model.parameters()) for _ in range(2))
    training = wrapped(model, first)
    training(X, Y)
    training.setOptimizer(second)
    kept = state_of(first)[WEIGHT].clone()
    assert kept.any()
    assert not state_of(second)[WEIGHT].any()
    training(X, Y)
    assert torch.equal(state_of(first)[WEIGHT], kept)
    training.setOptimizer(first)  # comes with its state
    assert torch.equal(state_of(first)[WEIGHT], kept)


@pytest.mark.spec("optimizers", 18)
def test_momenta_survive_detaching_and_destroying() -> None:
    losses = {}
    for way in ("plain", "detach", "destroy"):
        torch.manual_seed(3)
        model, optimizer, training = adam(lr=0.05)
        losses[way] = [training(X, Y).item() for _ in range(2)]
        if way == "detach":
            training.detachFromDevice()
            assert state_of(optimizer)[WEIGHT].any()
        if way == "destroy":
            training.destroy()
            assert state_of(optimizer)[WEIGHT].any()
            training = wrapped(model, optimizer)
        losses[way] += [training(X, Y).item() for _ in range(2)]
    assert losses["detach"] == losses["plain"]
    assert losses["destroy"] == losses["plain"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_state_outlives_an_executor_that_goes_while_another_is_captured(
    accumulation: int,
) -> None:
    _, optimizer, training = adam()
    executors = [training]
    del training
    executors[0](X, Y)

    class Dropping(Net):
        def forward(self, x, y):
            executors.clear()
            gc.collect()
            return super().forward(x, y)

    other = poptorch.trainingModel(Dropping(), options(accumulation=accumulation))
    assert torch.isfinite(other(X, Y)).all()
    assert not executors
    moment = state_of(optimizer)[WEIGHT]
    assert type(moment) is torch.Tensor
    assert moment.any()


@pytest.mark.spec("optimizers", 30)
def test_copies_of_optimizers_take_the_seat() -> None:
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=4.0)
    training = wrapped(model, optimizer)
    training(X, Y)
    weight = model.layer.weight.clone()
    other = copy.copy(optimizer)
    other.loss_scaling, other.param_groups[0]["lr"] = 8.0, 0.0
    training.setOptimizer(other)
    training(X, Y)
    assert torch.equal(model.layer.weight, weight)
    assert other.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 8


@pytest.mark.spec("optimizers", 23)
@pytest.mark.parametrize("way", ["frozen", "left out"])
def test_parameters_that_are_not_trained_stay(way: str) -> None:
    model = Net()
    trained = [model.layer.bias] if way == "left out" else [*model.parameters()]
    training = wrapped(model, torch.optim.AdamW(trained, lr=0.1))
    if way == "frozen":
        model.layer.weight.requires_grad_(False)  # after wrapping
    weight, bias = model.layer.weight.clone(), model.layer.bias.clone()
    training(X, Y)
    assert torch.equal(model.layer.weight, weight)
    assert not torch.equal(model.layer.bias, bias)


class Product(nn.Module):
    """Its loss has the input's mean as the gradient of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.other = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return poptorch.identity_loss((self.weight * x + 0 * self.other).mean(), "none")


@pytest.mark.spec("optimizers", 4, 22)
@pytest.mark.parametrize("iterations, accumulation", [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_one_update_of_the_default_per_device_iteration(iterations: int, accumulation: int) -> None:
    model = Product()
    opts = options(iterations=iterations, accumulation=accumulation)
    training = poptorch.trainingModel(model, opts)
    training(torch.ones(iterations * accumulation))
    assert float(model.weight.detach()) == pytest.approx(-0.01 * iterations)


@pytest.mark.spec("optimizers", 20, 29)
@pytest.mark.parametrize("before", [True, False])
def test_it_may_be_made_before_or_after_wrapping_and_be_set_again(before: bool) -> None:
    model = Product()
    first = torch.optim.SGD([model.other, model.weight], lr=1.0, momentum=0.5) if before else None
    training = poptorch.trainingModel(model, options(), first)
    optimizer = first or torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(3):
        training.setOptimizer(optimizer)
        training(torch.ones(1))
    assert float(model.weight.detach()) == -(1 + 1.5 + 1.75)


def test_inference_has_no_optimizer() -> None:
    executor = poptorch.inferenceModel(Net(), options())
    with pytest.raises(AssertionError, match="wrapped for training"):
        executor.setOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_model_is_refused(library) -> None:
    training = wrapped(Net(), library.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="None of the optimizer's parameters") as caught:
        training(X, Y)
    assert "0 of group 0 of shape (2, 4)" in str(caught.value)


def test_parameters_that_the_model_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    other = [("scale", nn.Parameter(torch.ones(3)))]
    optimizer = torch.optim.SGD([*model.named_parameters(), *other], lr=0.1)
    twin = copy.deepcopy(model)
    wrapped(model, optimizer)(X, Y)
    (record,) = (r for r in caplog.records if "do not belong" in r.getMessage())
    assert "1 of the optimizer's 3 parameters" in record.getMessage()
    assert "'scale' of shape (3,)" in record.getMessage()
    wrapped(twin, torch.optim.SGD(twin.parameters(), lr=0.1))(X, Y)
    assert torch.equal(model.layer.weight, twin.layer.weight)
