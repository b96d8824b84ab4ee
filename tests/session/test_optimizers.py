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
from helpers.wrapped import normal

X, Y = normal(4, 4), normal(4, 2, seed=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


def options() -> poptorch.Options:
    return poptorch.Options().backend("reference").showCompilationProgressBar(False)


def wrapped(model: Net, optimizer=None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options(), optimizer)


def saved(value):
    """What comes out of a file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OPTIMIZERS = {
    "SGD": lambda p: poptorch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "Adam": lambda p: poptorch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: poptorch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_from_a_checkpoint_continues_bit_for_bit(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    training = wrapped(model, optimizer)
    for _ in range(3):
        training(X, Y)
    checkpoint = saved({"model": model.state_dict(), "opt": optimizer.state_dict()})
    expected = [training(X, Y) for _ in range(4)]

    twin = Net()
    twin.load_state_dict(checkpoint["model"])
    fresh = OPTIMIZERS[name](twin.parameters())
    fresh.load_state_dict(checkpoint["opt"])
    again = wrapped(twin, fresh)
    assert [again(X, Y) for _ in range(4)] == expected
    assert torch.equal(twin.layer.weight, model.layer.weight)


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14)
def test_state_is_none_until_compiled() -> None:
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = wrapped(model, optimizer)
    state = optimizer.state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    training.compile(X, Y)
    state = optimizer.state_dict()
    assert set(state["ipu_state"]) >= {"Accl1___layer.weight", "Accl2___layer.bias"}
    assert not state["ipu_state"]["Accl1___layer.weight"].any()
    assert state["ipu_param"]["learningRate___specific___layer.weight"] == torch.tensor(0.01)
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(RuntimeError, match="because it is empty"):
        optimizer.load_state_dict({})

    loaded = {**state, "ipu_state": {k: v + 0.5 for k, v in state["ipu_state"].items()}}
    twin = Net()
    other = poptorch.optim.Adam(twin.parameters(), lr=0.01)
    other.load_state_dict(loaded)  # before anything is compiled
    training = wrapped(twin, other)
    training.compile(X, Y)
    assert (other.state_dict()["ipu_state"]["Accl1___layer.weight"] == 0.5).all()


@pytest.mark.spec("executor", 60)
@pytest.mark.spec("optimizers", 15, 17)
def test_partial_states_merge_when_they_are_used(caplog) -> None:
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = wrapped(model, optimizer)
    training(X, Y)
    before = optimizer.state_dict()
    part = {"Accl1___layer.weight": torch.full((2, 4), 7.0)}
    optimizer.load_state_dict({**before, "ipu_state": part})
    assert set(optimizer.state_dict()["ipu_state"]) == set(part)
    optimizer.param_groups[0]["lr"] = 0.0
    training.setOptimizer(optimizer)  # no weight moves: only the state is of interest
    training(X, Y)
    merged = optimizer.state_dict()["ipu_state"]
    assert "lacks" in caplog.text
    assert set(merged) == set(before["ipu_state"])
    assert (merged["Accl1___layer.weight"] > 5).all()
    assert (merged["Accl1___layer.bias"].abs() < 5).all()


@pytest.mark.spec("optimizers", 15)
def test_the_state_is_read_once(caplog) -> None:
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = wrapped(model, optimizer)
    training(X, Y)
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        optimizer.state_dict()
        optimizer.state_dict()
    assert caplog.text.count("Writing optimiser state tensors from IPU to host") == 1


@pytest.mark.spec("executor", 29, 69)
@pytest.mark.spec("optimizers", 1, 2)
@pytest.mark.spec("programs", 19)
def test_a_changed_rate_waits_for_set_optimizer() -> None:
    for kind in (poptorch.optim.SGD, torch.optim.SGD):
        model = Net()
        optimizer = kind(model.parameters(), lr=0.1)
        training = wrapped(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.0  # after wrapping: not seen
        first = model.layer.weight.clone()
        training(X, Y)
        assert not torch.equal(model.layer.weight, first)
        after = model.layer.weight.clone()
        training.setOptimizer(optimizer)
        assert torch.isfinite(training(X, Y))
        assert torch.equal(model.layer.weight, after)
        optimizer.param_groups[0]["lr"] = 0.1
        training.setOptimizer(optimizer)
        training(X, Y)
        assert not torch.equal(model.layer.weight, after)


@pytest.mark.spec("executor", 30)
def test_what_is_compiled_in_cannot_change() -> None:
    model = Net()
    training = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training(X, Y)
    weight = model.layer.weight.clone()
    with pytest.raises(poptorch.Error, match="momentum"):
        training.setOptimizer(poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(poptorch.Error, match="type of the optimizer"):
        training.setOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        training.setOptimizer(torch.optim.Adagrad(model.parameters()))
    assert torch.equal(model.layer.weight, weight)
    assert torch.isfinite(training(X, Y))  # with the optimizer that it had

    model = Net()
    explicit = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = wrapped(model, explicit)
    training(X, Y)
    explicit.param_groups[0]["momentum"] = 0.5  # variable: it was passed
    training.setOptimizer(explicit)
    explicit.param_groups[0]["weight_decay"] = 0.5  # constant: it was not
    with pytest.raises(poptorch.Error, match="weight_decay"):
        training.setOptimizer(explicit)


@pytest.mark.spec("executor", 33)
def test_a_replaced_optimizer_keeps_its_last_state() -> None:
    model = Net()
    first = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = wrapped(model, first)
    training(X, Y)
    second = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training.setOptimizer(second)
    kept = first.state_dict()["ipu_state"]["Accl1___layer.weight"].clone()
    assert kept.any()
    assert not second.state_dict()["ipu_state"]["Accl1___layer.weight"].any()
    training(X, Y)
    assert torch.equal(first.state_dict()["ipu_state"]["Accl1___layer.weight"], kept)
    training.setOptimizer(first)  # comes with its state
    assert torch.equal(first.state_dict()["ipu_state"]["Accl1___layer.weight"], kept)


@pytest.mark.spec("executor", 34, 54)
def test_schedulers(caplog) -> None:
    for kind in (poptorch.optim.SGD, torch.optim.SGD):
        model = Net()
        optimizer = kind(model.parameters(), lr=0.1)
        training = wrapped(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        training(X, Y)
        scheduler.step()  # no warning about a step of the optimizer: the device made it
        caplog.clear()
        training.setOptimizer(optimizer)
        training.setOptimizer(optimizer)
        assert caplog.text.count("Ignoring unexpected") == 1
        assert "initial_lr" in caplog.text
        twin = copy.deepcopy(model)
        loss = twin(X, Y)
        loss.backward()
        training(X, Y)
        step = twin.layer.weight.detach() - 0.05 * twin.layer.weight.grad
        torch.testing.assert_close(model.layer.weight.detach(), step)


@pytest.mark.spec("optimizers", 18)
def test_momenta_survive_detaching_and_destroying() -> None:
    losses = {}
    for way in ("plain", "detach", "destroy"):
        torch.manual_seed(3)
        model = Net()
        optimizer = poptorch.optim.Adam(model.parameters(), lr=0.05)
        training = wrapped(model, optimizer)
        losses[way] = [training(X, Y).item() for _ in range(2)]
        if way == "detach":
            training.detachFromDevice()
            assert optimizer.state_dict()["ipu_state"]["Accl1___layer.weight"].any()
            training.attachToDevice()
        if way == "destroy":
            training.destroy()
            assert optimizer.state_dict()["ipu_state"]["Accl1___layer.weight"].any()
            training = wrapped(model, optimizer)
        losses[way] += [training(X, Y).item() for _ in range(2)]
    assert losses["detach"] == losses["plain"]
    assert losses["destroy"] == losses["plain"]


def test_the_state_outlives_the_executor() -> None:
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.05)
    training = wrapped(model, optimizer)
    training(X, Y)
    del training
    gc.collect()
    assert optimizer.state_dict()["ipu_state"]["Accl1___layer.weight"].any()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_state_is_saved_while_another_model_is_captured(accumulation: int) -> None:
    doomed = Net()
    optimizer = poptorch.optim.Adam(doomed.parameters(), lr=0.05)
    executors = [wrapped(doomed, optimizer)]
    executors[0](X, Y)

    class Dropping(Net):
        def forward(self, x, y):
            executors.clear()
            return super().forward(x, y)

    model = Dropping()
    opts = options()
    opts.Training.gradientAccumulation(accumulation)
    other = poptorch.trainingModel(model, opts)
    assert torch.isfinite(other(X, Y))
    assert not executors
    assert {slot.kind for slot in other.plan().program.state_slots().values()} <= {
        "param",
        "accum",
        "optstate",
        "hyper",
    }
    moment = optimizer.state_dict()["ipu_state"]["Accl1___layer.weight"]
    assert type(moment) is torch.Tensor
    assert moment.any()


@pytest.mark.spec("optimizers", 10)
def test_half_accumulators_choose_the_running_mean() -> None:
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, accum_type=torch.float16)
    training = wrapped(model, optimizer)
    strategy = training.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy == poptorch.MeanReductionStrategy.Running

    model = Net()
    training = wrapped(model, poptorch.optim.SGD(model.parameters(), lr=0.1))
    training(X, Y)
    with pytest.raises(ValueError, match="Running"):
        training.setOptimizer(
            poptorch.optim.SGD(model.parameters(), lr=0.1, accum_type=torch.float16)
        )


@pytest.mark.spec("optimizers", 30)
def test_copies_of_optimizers_take_the_seat() -> None:
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=4.0)
    training = wrapped(model, optimizer)
    training(X, Y)
    other = copy.copy(optimizer)
    other.loss_scaling = 8.0
    training.setOptimizer(other)
    assert torch.isfinite(training(X, Y))
    assert other.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 8


def test_parameters_frozen_after_wrapping_are_not_trained() -> None:
    model = Net()
    training = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.layer.weight.requires_grad_(False)
    weight, bias = model.layer.weight.clone(), model.layer.bias.clone()
    training(X, Y)
    assert torch.equal(model.layer.weight, weight)
    assert not torch.equal(model.layer.bias, bias)


def test_inference_has_no_optimizer() -> None:
    executor = poptorch.inferenceModel(Net(), options())
    with pytest.raises(AssertionError, match="wrapped for training"):
        executor.setOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_unsupported_optimizers_are_refused_when_wrapping() -> None:
    model = Net()
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        wrapped(model, torch.optim.Adagrad(model.parameters()))
    assert type(model) is Net  # and nothing has been wrapped


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_model_is_refused(library) -> None:
    training = wrapped(Net(), library.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="None of the optimizer's parameters") as caught:
        training(X, Y)
    assert "0 of group 0 of shape (2, 4)" in str(caught.value)


def test_parameters_that_the_model_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    other = [("scale", nn.Parameter(torch.ones(3)))]
    optimizer = torch.optim.SGD([*model.named_parameters(), *other], lr=0.1)
    wrapped(model, optimizer)(X, Y)
    (record,) = (r for r in caplog.records if "do not belong" in r.getMessage())
    assert "1 of the optimizer's 3 parameters" in record.getMessage()
    assert "'scale' of shape (3,)" in record.getMessage()
    native = torch.optim.SGD(eager.parameters(), lr=0.1)
    eager(X, Y).backward()
    native.step()
    torch.testing.assert_close(model.layer.weight, eager.layer.weight)
