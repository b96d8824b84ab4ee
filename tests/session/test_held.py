"""Tensors that somebody holds: what they read, who is newer of several models, what is kept."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import few
from helpers.closeness import near
from helpers.wrapping import Graded, Having, Regression, Twins, normal, options, saved, training

X, Y = normal(4, 3), normal(4, 2, seed=1)
adam = functools.partial(torch.optim.Adam, lr=0.05)


class Net(Graded):
    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d(3), fc=nn.Linear(3, 2))


def listed(model: nn.Module, optimizer: object) -> list[nn.Parameter]:
    return list(model.parameters())


# What somebody holds before training, and how he reads the weight of it.
HELD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a weight": (lambda m, o: m.fc.weight, lambda w: w + 0),
    "a list": (listed, lambda held: held[2].clone()),
    "groups": (lambda m, o: o.param_groups, lambda held: held[0]["params"][2][:]),
    "a vector": (listed, lambda held: nn.utils.parameters_to_vector(held)[6:12].view(2, 3)),
    "an average": (listed, lambda held: torch._foreach_lerp([torch.zeros(2, 3)], held[2:3], 1)[0]),
    "another module": (lambda m, o: Having(None, layer=m.fc.weight), lambda held: held.layer * 1),
    "a parameter of it": (lambda m, o: m.fc.weight, lambda w: nn.Parameter(w) + 0),
    "a copy": (lambda m, o: m.fc.weight, copy.deepcopy),
    "a shallow copy": (lambda m, o: copy.copy(m), lambda twin: twin.fc.weight * 1),
    "a pickle": (lambda m, o: m.fc.weight, lambda w: pickle.loads(pickle.dumps(w))),
    "a file": (lambda m, o: m.fc.weight, lambda w: saved(w)),
    "numbers": (lambda m, o: m.fc.weight, lambda w: torch.tensor(w.tolist())),
    "an array": (lambda m, o: m.fc.weight, lambda w: torch.tensor(w.detach().numpy())),
    "a buffer": (lambda m, o: m.norm.running_mean, lambda mean: mean * 1),
}


def test_who_holds_a_tensor_reads_trained_values() -> None:
    twins = Twins(Net(), adam, **near(8, 10, size=0.1))
    for name, (hold, read) in HELD.items():
        held, theirs = hold(twins.model, twins.ours), hold(twins.eager, twins.theirs)
        twins.step(X, Y, count=2)
        got = read(held)
        torch.testing.assert_close(got, read(theirs), msg=lambda text, name=name: f"{name}: {text}")
        assert type(got) in (torch.Tensor, nn.Parameter)
    weight = twins.model.fc.weight
    twins.step(X, Y)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (2, 3)
    assert weight.grad is None
    assert twins.wrapped._session.weights.device.newer  # none of these needs values
    twins.wrapped.destroy()
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, twins.model.fc.weight)
    assert vars(weight) == {}


def written(executor: Any) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(each) for each in executor._session.weights.store.state.tensors.values()]


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_devices_tensors_go_when_it_goes(library) -> None:
    """Without the garbage collector, which nobody waits for."""
    model = Net()
    optimizer = library.Adam(model.parameters(), lr=0.05)
    executor = poptorch.trainingModel(model, options(), optimizer)
    gc.collect()
    gc.disable()
    try:
        for way in ("detachFromDevice", "destroy", "destroy", "dropped"):
            executor(X, Y)
            optimizer.state_dict()
            executor(X, Y)
            held = written(executor)
            if way == "dropped":
                executor = None
            else:
                getattr(executor, way)()
            kept = [] if executor is None else [*(executor._session.kept or {}).values()]
            assert {id(each()) for each in held if each() is not None} <= {*map(id, kept)}
            # The optimizer's, for the next device.
            assert len(kept) == (9 if way == "detachFromDevice" else 0)
    finally:
        gc.enable()


def test_a_model_that_reaches_its_executor_goes_with_it_and_leaves_what_was_trained() -> None:
    class Trainer:
        def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            self.run = poptorch.trainingModel(Having(self.loss, layer=layer), options(), optimizer)

        def loss(self, model, x, y):
            return nn.functional.mse_loss(model.layer(x), y)

    twins = Twins(Regression(3, 2), adam, **near(10, 2))
    trainer = Trainer(twins.model.layer, twins.ours)
    validation = poptorch.inferenceModel(twins.model, options())
    validation(X)
    trainer.run(X, Y)
    held = written(trainer.run)
    del trainer
    gc.collect()
    assert all(each() is None for each in held)
    twins.eager_step(X, Y)
    torch.testing.assert_close(validation(X), twins.eager(X))
    twins.compare()


def test_a_program_that_is_replaced_goes_at_once() -> None:
    model = Net()
    executor = training(model)
    executor(X, Y)
    gc.collect()
    gc.disable()
    try:
        program, held = weakref.ref(executor._session.now), written(executor)
        moving = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        executor.setOptimizer(moving)
        executor(X, Y)
        now = executor._session.weights.store.state.tensors.values()
        assert program() is None
        assert {id(each()) for each in held if each() is not None} <= {*map(id, now)}
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["swapped", "new storage"])
def test_an_optimizers_state_follows_a_parameter_whose_data_are_others(way: str) -> None:
    layers = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    two = Having(lambda m, x: nn.functional.mse_loss(m.second(torch.tanh(m.first(x))), x), **layers)
    twins = Twins(two, adam, **near(8, 10, size=0.1))
    twins.step(X)
    for model in (twins.model, twins.eager):
        first, second = model.first.weight, model.second.weight
        if way == "swapped":
            first.data, second.data = second.data, first.data
        else:
            first.data = first.data.clone()
    twins.wrapped.copyWeightsToDevice()
    twins.step(X, count=2)
    twins.compare()


def test_what_is_saved_has_what_was_loaded_into_the_optimizer(tmp_path) -> None:
    for edits in (False, True):
        for detached in (False, True):
            model = Net()
            optimizer = adam(model.parameters())
            executor = poptorch.trainingModel(model, options(), optimizer)
            executor(X, Y)
            state = copy.deepcopy(optimizer.state_dict())
            executor(X, Y)
            if detached:
                executor.detachFromDevice()
            if edits:
                optimizer.state[model.fc.weight]["exp_avg"].fill_(7.0)
            else:
                state["state"][2]["exp_avg"].fill_(7.0)
                optimizer.load_state_dict(state)
            executor.save(tmp_path / "model")
            other = Net()
            loaded = adam(other.parameters())
            second = poptorch.load(tmp_path / "model", model=other, optimizer=loaded)
            second(X, Y)
            executor(X, Y)
            torch.testing.assert_close(other.state_dict(), model.state_dict())
            torch.testing.assert_close(loaded.state_dict(), optimizer.state_dict())


class Tagged(nn.Linear):
    """A class that hears of its subclasses, and copies in its own ways."""

    made: list[type] = []

    def __init_subclass__(cls, tag: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.made.append(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tagged:
        twin = type(self)(3, 2)
        twin.load_state_dict(self.state_dict())
        twin.deep = True
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pickled": True}

    def forward(self, x, y):
        return nn.functional.mse_loss(super().forward(x), y)


def test_hooks_and_copies_of_the_users_class_are_his_own() -> None:
    model, plain = Tagged(3, 2), Tagged(3, 2)
    training(model)(X, Y)
    assert Tagged.made == []
    for wrapped, unwrapped in (
        (copy.deepcopy(model), copy.deepcopy(plain)),
        (pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(plain))),
    ):
        assert (type(wrapped), type(wrapped._parameters)) == (Tagged, dict)
        assert vars(wrapped).keys() == vars(unwrapped).keys()
        assert torch.equal(wrapped.weight, model.weight)


@pytest.mark.parametrize("backend", few(["reference", "inductor"], "reference"))
def test_what_inference_counts_comes_down_when_it_is_asked_for(backend: str) -> None:
    def count(own, x):
        if own.training:  # a program for eval() reads the one and not the other
            own.count.add_(1)
            own.seen.add_(1)
        return own.count * x

    model = Having(count, count=torch.zeros(1), seen=torch.zeros(1))
    executor, counted, seen = poptorch.inferenceModel(model, options(backend)), 0, 0
    for way in ("detachFromDevice", "copyWeightsToDevice", "copyWeightsToHost", "destroy") * 2:
        before = counted
        for mode in (True, False, True, False):
            executor.train(mode)
            counted, seen = counted + mode, seen + mode
            assert executor(torch.ones(1)) == counted
            assert model.count == before
            model.seen.fill_(7.0)  # an edit that nobody copies to the device
        getattr(executor, way)()
        if way == "copyWeightsToDevice":
            counted, seen = before, 7
        assert (model.count, model.seen) == (counted, seen)
