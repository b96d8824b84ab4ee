"""The optimizer of a wrapped model: when it is read, its state, checkpoints, replacements."""

import copy
import logging

import pytest
import torch

import poptorch
from helpers.wrapping import Regression as Net
from helpers.wrapping import Scaled, normal, options, saved

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


OPTIMIZERS = {
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "combined": lambda p: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=3.0, weight_decay=0.07
    ),
    "AdamW": lambda p: poptorch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.999), eps=1e-7),
    "RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01, max_weight_norm=3.3),
}


@pytest.mark.spec("optimizers", 18, 19, 20)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_detaching_and_destroying_continue_bit_for_bit(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    training = wrapped(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        training(X, Y)
        training.setOptimizer(optimizer)
    scheduler.step()
    training.setOptimizer(optimizer)
    checkpoint = saved({"model": model.state_dict(), "opt": optimizer.state_dict()})
    twin = Net()
    twin.load_state_dict(checkpoint["model"])
    fresh = OPTIMIZERS[name](twin.parameters())
    fresh.load_state_dict(checkpoint["opt"])
    again = wrapped(twin, fresh)
    expected = [again(X, Y) for _ in range(4)]
    losses = [training(X, Y)]
    training.detachFromDevice()
    losses += [training(X, Y) for _ in range(2)]
    training.destroy()
    training = wrapped(model, optimizer)
    assert [*losses, training(X, Y)] == expected
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)
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
    assert not state["ipu_state"][WEIGHT].any()
    assert state["ipu_param"]["learningRate___specific___layer.weight"] == torch.tensor(0.01)
    native = torch.optim.Adam(model.parameters(), lr=0.5).state_dict()
    for wrong in (native, {**state, "ipu_state": 3}, {**native, "ipu_state": {}}):
        with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded") as caught:
            optimizer.load_state_dict(wrong)
        assert isinstance(caught.value, poptorch.Error)
    for empty in ({}, None):
        with pytest.raises(RuntimeError, match="because it is empty"):
            optimizer.load_state_dict(empty)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    assert not optimizer.ipu_state_is_dirty
    _, other, training = adam()
    other.load_state_dict({"ipu_state": None, "ipu_param": None, **native})  # torch's part only
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.ipu_state_is_dirty
    other.load_state_dict({**state, "ipu_state": {WEIGHT: state["ipu_state"][WEIGHT] + 0.5}})
    training.compile(X, Y)  # nothing was, before
    assert (state_of(other)[WEIGHT] == 0.5).all()
    assert state_of(other).keys() == state["ipu_state"].keys()  # what is not loaded stays


@pytest.mark.spec("executor", 60)
@pytest.mark.spec("optimizers", 15, 17)
def test_states_are_read_once_and_partial_ones_merge_when_they_are_used(caplog) -> None:
    _, optimizer, training = adam()
    training(X, Y)
    assert optimizer.get_state_dict()["ipu_state"] is None
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        before = optimizer.state_dict()
        optimizer.state_dict()
    assert caplog.text.count("Writing optimiser state tensors from IPU to host") == 1
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


@pytest.mark.spec("executor", 29, 34, 54, 69)
@pytest.mark.spec("optimizers", 1, 2)
@pytest.mark.spec("programs", 19)
@pytest.mark.parametrize("kind", [poptorch.optim.SGD, torch.optim.SGD])
def test_a_changed_rate_waits_for_set_optimizer(kind) -> None:
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
@pytest.mark.spec("optimizers", 29, 30)
def test_a_replaced_optimizer_keeps_its_last_state() -> None:
    model = Net()
    training = wrapped(model)  # optimizers may be made afterwards
    first, second = (poptorch.optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=1.0)
                     for p in (model.parameters(), [*model.parameters()][::-1]))  # fmt: skip
    training.setOptimizer(first)
    training(X, Y)
    training.setOptimizer(second)
    kept = state_of(first)[WEIGHT].clone()
    assert kept.any()
    assert not state_of(second)[WEIGHT].any()
    training(X, Y)
    assert torch.equal(state_of(first)[WEIGHT], kept)
    other = copy.copy(first)
    other.loss_scaling, other.param_groups[0]["lr"] = 8.0, 0.0
    weight = model.layer.weight.clone()
    training.setOptimizer(other)  # comes with its state
    assert torch.equal(state_of(other)[WEIGHT], kept)
    training(X, Y)
    assert torch.equal(model.layer.weight, weight)
    assert other.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 8


@pytest.mark.spec("optimizers", 4, 22)
def test_one_update_of_the_default_per_device_iteration() -> None:
    training = poptorch.trainingModel(Scaled(lambda x: x), options(iterations=3, accumulation=2))
    weight = 2.0
    training(torch.ones(6))
    for _ in range(3):
        weight -= 0.01 * 2 * weight
    assert training.model.weight.item() == pytest.approx(weight)
    executor = poptorch.inferenceModel(Net(), options())
    with pytest.raises(AssertionError, match="wrapped for training"):
        executor.setOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.spec("optimizers", 23)
@pytest.mark.parametrize("way", ["frozen", "left out"])
def test_parameters_that_are_not_trained_stay(way: str, caplog) -> None:
    model = Net()
    trained = [("bias", model.layer.bias)] if way == "left out" else [*model.named_parameters()]
    other = [("scale", torch.nn.Parameter(torch.ones(3)))]
    training = wrapped(model, torch.optim.SGD(trained + other, lr=0.1))
    if way == "frozen":
        model.layer.weight.requires_grad_(False)  # after wrapping
    twin = copy.deepcopy(model)
    twin(X, Y).backward()
    training(X, Y)
    assert torch.equal(model.layer.weight, twin.layer.weight)
    torch.testing.assert_close(model.layer.bias, twin.layer.bias - 0.1 * twin.layer.bias.grad)
    (said,) = (text for text in caplog.messages if "do not belong" in text)
    assert f"1 of the optimizer's {len(trained) + 1} parameters" in said
    assert "'scale' of shape (3,)" in said


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_model_is_refused(library) -> None:
    training = wrapped(Net(), library.SGD(Net().parameters(), lr=0.1))
    said = r"(?s)None of the optimizer's parameters.*0 of group 0 of shape \(2, 4\)"
    with pytest.raises(poptorch.Error, match=said):
        training(X, Y)
