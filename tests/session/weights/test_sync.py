"""Weights on the device and the host: who has the newer ones, when they travel, who holds them."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import few
from helpers.closeness import near
from helpers.wrapping import EagerPair, Graded, Having, inference, normal, options, saved, training

X, Y = normal(4, 4), normal(4, 2, seed=1)
sgd = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.top = nn.Parameter(torch.ones(2))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x) * self.top
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def trained(model: nn.Module) -> poptorch.PoplarExecutor:
    executor = training(model)
    for _ in range(3):
        executor(X, Y)
    return executor


READS = {
    "attribute": lambda m, t: m.layer.weight,
    "executor attribute": lambda m, t: t.layer.weight,
    "parameters": lambda m, t: next(iter(m.layer.parameters())),
    "named_parameters": lambda m, t: dict(m.named_parameters())["layer.weight"],
    "state_dict": lambda m, t: m.state_dict()["layer.weight"],
    "file": lambda m, t: saved(m.state_dict())["layer.weight"],
    "deepcopy": lambda m, t: copy.deepcopy(m).layer.weight,
    "forward": lambda m, t: m(X),
    "pickle": lambda m, t: pickle.loads(pickle.dumps(m)).layer.weight,
}


@pytest.mark.spec("executor", 4, 5, 55, 58)
@pytest.mark.spec("programs", 5)
def test_every_way_of_reading_weights_sees_trained_values() -> None:
    pair = EagerPair(Net(), sgd)
    for look in READS.values():
        pair.step(X, Y, count=2)
        assert torch.equal(look(pair.model, pair.wrapped), look(pair.eager, pair.eager))
    assert set(pair.wrapped.plan().program.graphs) == {"step"}  # one graph holds it all


def transfers(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How often weights have come down, and how often they have gone up."""
    ways = "from IPU to host", "from host to IPU memory"
    return [caplog.text.count(f"Writing weights {way}") for way in ways]


@pytest.mark.spec("executor", 6, 39, 57, 58, 59)
@pytest.mark.spec("programs", 6)
@pytest.mark.parametrize("first", ["training", "inference"])
def test_several_training_calls_cause_one_download_and_validation_refreshes_itself(
    first: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "poptorch:cpp")
    pair = EagerPair(Net(), sgd)
    if first == "inference":
        inference = poptorch.inferenceModel(pair.model, options())
        inference(X)
    pair.step(X, Y, count=3)
    compiled = 2 if first == "inference" else 1  # compiling uploads by itself
    assert transfers(caplog) == [0, compiled]
    if first == "training":
        inference = poptorch.inferenceModel(pair.model, options())
    for _ in range(3):
        pair.model.state_dict()
        pair.model(X)
        assert torch.equal(inference(X), pair.eager(X))
    assert transfers(caplog) == [1, compiled + 1]
    pair.step(X, Y)
    inference(X)
    inference(X)
    assert transfers(caplog) == [2, compiled + 2]
    assert not pair.wrapped.copyWeightsToHostIfNeeded()


@pytest.mark.spec("executor", 7)
def test_host_edits_wait_for_an_explicit_copy() -> None:
    model = Net()
    inference = poptorch.inferenceModel(model, options())
    before = inference(X)
    nn.init.zeros_(model.layer.weight)
    assert torch.equal(inference(X), before)
    inference.copyWeightsToDevice()
    assert torch.equal(inference(X), model(X))
    inference.load_state_dict(Net().state_dict())
    assert torch.equal(inference(X), model(X))


@pytest.mark.spec("executor", 8, 9, 53, 68)
def test_uploading_discards_progress_and_host_tensors_keep_identity_and_storage() -> None:
    model = Net()
    model.tied = nn.Linear(4, 2)
    model.tied.weight = weight = model.layer.weight
    before, storage = weight.clone(), weight.data_ptr()
    executor = trained(model)
    executor.copyWeightsToDevice()
    executor.copyWeightsToHost()
    assert torch.equal(weight, before)
    executor(X, Y)
    executor.copyWeightsToHost()
    assert not torch.equal(weight, before)
    assert model.tied.weight is model.layer.weight is weight  # tied weights stay tied
    state = model.state_dict()
    assert state["tied.weight"].data_ptr() == state["layer.weight"].data_ptr() == storage


@pytest.mark.spec("executor", 1)
def test_wrapping_a_model_for_training_changes_its_class_in_place() -> None:
    executor = trained(model := Net())

    assert type(model).__name__ == "PoptorchNet"
    assert isinstance(model, Net)
    assert executor.model is model


@pytest.mark.spec("executor", 2, 3)
def test_wrapping_a_model_for_inference_copies_it() -> None:
    executor = trained(model := Net())

    assert poptorch.inferenceModel(executor, options()).model is not model


@pytest.mark.spec("executor", 1)
def test_a_model_whose_executor_was_destroyed_has_its_own_class_and_parameters() -> None:
    pair = EagerPair(Net(), sgd)
    pair.step(X, Y)

    pair.wrapped.destroy()

    assert not pair.wrapped.isCompiled()
    assert type(pair.model) is Net
    assert type(pair.model.layer._parameters) is dict
    pair.compare()


@pytest.mark.spec("executor", 36)
def test_a_destroyed_executor_compiles_and_trains_again() -> None:
    pair = EagerPair(Net(), sgd)
    pair.step(X, Y)
    pair.wrapped.destroy()

    pair.step(X[:2], Y[:2])

    assert type(pair.model).__name__ == "PoptorchNet"
    pair.compare()


@pytest.mark.spec("executor", 51)
def test_an_attribute_that_is_assigned_on_an_executor_stays_there() -> None:
    executor = trained(model := Net())

    executor.note = 3

    assert not hasattr(model, "note")


@pytest.mark.spec("executor", 2)
def test_a_destroyed_executor_refuses_calls_if_another_one_has_its_model() -> None:
    pair = EagerPair(Net(), sgd)
    pair.step(X, Y)
    first = pair.wrapped
    first.destroy()
    pair.wrapped = poptorch.trainingModel(pair.model, options(), pair.ours)

    with pytest.raises(RuntimeError, match="already been wrapped"):
        first(X, Y)


@pytest.mark.spec("executor", 52)
def test_a_second_executor_keeps_the_model_when_the_first_one_is_collected() -> None:
    pair = EagerPair(Net(), sgd)
    pair.step(X, Y)
    pair.wrapped.destroy()

    pair.wrapped = poptorch.trainingModel(pair.model, options(), pair.ours)
    gc.collect()
    pair.step(X, Y)

    assert type(pair.model).__name__ == "PoptorchNet"
    pair.compare()


def test_an_executor_may_be_collected_while_another_is_captured() -> None:
    pair = EagerPair(Net(), functools.partial(sgd, momentum=0.9))
    pair.step(X, Y)

    class Dropping(Net):
        def forward(
            self, x: torch.Tensor, y: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            pair.wrapped = None
            gc.collect()
            return super().forward(x, y)

    assert torch.isfinite(poptorch.trainingModel(Dropping(), options(accumulation=2))(X, Y)[1])
    pair.compare()
    assert type(pair.model) is Net


def test_gradients_of_the_hosts_own_are_forgotten_and_move_no_weights() -> None:
    model = Net()
    executor = trained(model)
    model.zero_grad()
    assert executor.copyWeightsToHostIfNeeded()
    (model.top * 2).sum().backward()
    assert model.top.grad is not None
    model.zero_grad(set_to_none=False)
    assert torch.equal(model.top.grad, torch.zeros(2))


@pytest.mark.spec("parallel", 47)
def test_an_executor_is_saved_before_it_is_compiled() -> None:
    model = Net()
    expected = copy.deepcopy(model)(X, Y)[1].detach()
    poptorch.BeginBlock(model.layer, "A", ipu_id=1)
    executor = poptorch.trainingModel(model, options(accumulation=4))
    loaded = saved(executor, weights_only=False)
    torch.testing.assert_close(loaded(X.repeat(4, 1), Y.repeat(4, 1))[1], expected)
    assert [stage.chip for stage in loaded.plan().layout.stages if "A" in stage.blocks] == [1]
    assert not executor.isCompiled()


A, B = normal(8, 2), normal(8, 2, seed=1)


def net() -> Having:
    """A weight and a buffer of its own, and one below."""

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = model.below(x * model.weight + model.offset)
        return out if y is None else (out, nn.functional.mse_loss(out, y))

    weight = nn.Parameter(torch.ones(2))
    return Having(forward, weight=weight, offset=torch.zeros(2), below=nn.BatchNorm1d(2))


def assign(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.tensor([2.0, -3.0]))
    model.offset = torch.tensor([5.0, 6.0])
    model.below.bias = nn.Parameter(torch.tensor([0.5, -0.5]))
    model.below.running_mean = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("when", ["before compiling", "after compiling", "detached"])
def test_assigned_values_reach_the_device(train: bool, when: str) -> None:
    model = net()
    executor = training(model, lr=0.5) if train else inference(model.eval())
    args = (A, B) if train else (A,)
    if when != "before compiling":
        executor(*args)
    if when == "detached":
        executor.detachFromDevice()
    first, trained = model.weight, model.weight.detach().clone()
    if when == "after compiling":
        executor(*args)
    assign(model)  # what was trained until then is for the old tensor
    assert torch.equal(first, trained) != (train and when == "after compiling")
    eager = copy.deepcopy(model)
    if when == "after compiling":
        executor.copyWeightsToDevice()
    got, expected = executor(*args), eager(*args)
    if train:
        expected[1].backward()
        torch.testing.assert_close(got[1], expected[1].detach())
        torch.testing.assert_close(model.weight, eager.weight - 0.5 * eager.weight.grad)
    else:
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.below.running_mean, eager.below.running_mean)


def test_state_that_does_not_fit_is_refused_and_replaced_parameters_are_released() -> None:
    model = net()
    executor = training(model)
    executor(A, B)
    kept = model.offset
    model.offset = torch.zeros(3)
    with pytest.raises(
        poptorch.Error, match=r"(?s)shape of 'offset'.*\(3,\); when compiled it was \(2,\)"
    ):
        executor.copyWeightsToDevice()
    model.offset = kept
    model.register_buffer("another", torch.zeros(1))
    with pytest.raises(poptorch.Error, match=r"(?s)have changed since it was.*another"):
        executor.copyWeightsToDevice()
    del model.another
    executor.copyWeightsToDevice()
    expected = copy.deepcopy(model)(A, B)[1].detach()
    assert torch.equal(executor(A, B)[1], expected)
    others = {name: value.clone() for name, value in model.state_dict().items()}
    old = [weakref.ref(each) for each in model.parameters()]
    model.load_state_dict(others, assign=True)
    executor.copyWeightsToDevice()
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    executor(A, B)
    gc.collect()
    assert [each() for each in old] == [None] * len(old)


P, Q = normal(4, 3), normal(4, 2, seed=1)
adam = functools.partial(torch.optim.Adam, lr=0.05)


class Layered(Graded):
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
    "a shallow copy": (lambda m, o: copy.copy(m), lambda tied: tied.fc.weight * 1),
    "a pickle": (lambda m, o: m.fc.weight, lambda w: pickle.loads(pickle.dumps(w))),
    "a file": (lambda m, o: m.fc.weight, lambda w: saved(w)),
    "numbers": (lambda m, o: m.fc.weight, lambda w: torch.tensor(w.tolist())),
    "an array": (lambda m, o: m.fc.weight, lambda w: torch.tensor(w.detach().numpy())),
    "a buffer": (lambda m, o: m.norm.running_mean, lambda mean: mean * 1),
}


def test_a_reference_to_a_parameter_reads_trained_values() -> None:
    pair = EagerPair(Layered(), adam, **near(8, 10, size=0.1))
    for name, (hold, read) in HELD.items():
        held, theirs = hold(pair.model, pair.ours), hold(pair.eager, pair.theirs)
        pair.step(P, Q, count=2)
        got = read(held)
        torch.testing.assert_close(got, read(theirs), msg=lambda text, name=name: f"{name}: {text}")
        assert type(got) in (torch.Tensor, nn.Parameter)
    weight = pair.model.fc.weight
    pair.step(P, Q)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (2, 3)
    assert weight.grad is None
    assert pair.wrapped._session.weights.device.newer  # none of these needs values
    pair.wrapped.destroy()
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, pair.model.fc.weight)
    assert vars(weight) == {}


def written(executor: Any) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(each) for each in executor._session.weights.store.state.tensors.values()]


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_tensors_of_a_device_are_released_with_it(library: Any) -> None:
    """They are released without a run of the garbage collector."""
    model = Layered()
    optimizer = library.Adam(model.parameters(), lr=0.05)
    executor = poptorch.trainingModel(model, options(), optimizer)
    gc.collect()
    gc.disable()
    for way in ("detachFromDevice", "destroy", "destroy", "dropped"):
        executor(P, Q)
        optimizer.state_dict()
        executor(P, Q)
        held = written(executor)
        if way == "dropped":
            executor = None
        else:
            getattr(executor, way)()
        kept = [] if executor is None else [*(executor._session.kept or {}).values()]
        assert {id(each()) for each in held if each() is not None} <= {*map(id, kept)}
        # The optimizer's, for the next device.
        assert len(kept) == (9 if way == "detachFromDevice" else 0)


def test_a_model_with_a_reference_to_its_executor_is_collected_and_its_weights_are_trained() -> (
    None
):
    class Trainer:
        def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            self.run = poptorch.trainingModel(Having(self.loss, layer=layer), options(), optimizer)

        def loss(self, model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(model.layer(x), y)

    pair = EagerPair(Graded(layer=nn.Linear(3, 2)), adam, **near(10, 2))
    trainer = Trainer(pair.model.layer, pair.ours)
    validation = poptorch.inferenceModel(pair.model, options())
    validation(P)
    trainer.run(P, Q)
    held = written(trainer.run)
    del trainer
    gc.collect()
    assert all(each() is None for each in held)
    pair.eager_step(P, Q)
    torch.testing.assert_close(validation(P), pair.eager(P))
    pair.compare()


def test_a_replaced_program_is_released_at_once() -> None:
    model = Layered()
    executor = training(model)
    executor(P, Q)
    gc.collect()
    gc.disable()
    program, held = weakref.ref(executor._session.now), written(executor)
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    executor(P, Q)
    now = executor._session.weights.store.state.tensors.values()
    assert program() is None
    assert {id(each()) for each in held if each() is not None} <= {*map(id, now)}


@pytest.mark.parametrize("way", ["swapped", "new storage"])
def test_an_optimizers_state_follows_a_parameter_whose_data_are_others(way: str) -> None:
    layers = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    two = Having(lambda m, x: nn.functional.mse_loss(m.second(torch.tanh(m.first(x))), x), **layers)
    pair = EagerPair(two, adam, **near(8, 10, size=0.1))
    pair.step(P)
    for model in (pair.model, pair.eager):
        first, second = model.first.weight, model.second.weight
        if way == "swapped":
            first.data, second.data = second.data, first.data
        else:
            first.data = first.data.clone()
    pair.wrapped.copyWeightsToDevice()
    pair.step(P, count=2)
    pair.compare()


def test_a_saved_state_contains_the_state_that_was_loaded_into_the_optimizer(
    tmp_path: Path,
) -> None:
    for edits in (False, True):
        for detached in (False, True):
            model = Layered()
            optimizer = adam(model.parameters())
            executor = poptorch.trainingModel(model, options(), optimizer)
            executor(P, Q)
            state = copy.deepcopy(optimizer.state_dict())
            executor(P, Q)
            if detached:
                executor.detachFromDevice()
            if edits:
                optimizer.state[model.fc.weight]["exp_avg"].fill_(7.0)
            else:
                state["state"][2]["exp_avg"].fill_(7.0)
                optimizer.load_state_dict(state)
            executor.save(tmp_path / "model")
            other = Layered()
            loaded = adam(other.parameters())
            poptorch.load(tmp_path / "model", model=other, optimizer=loaded)(P, Q)
            executor(P, Q)
            torch.testing.assert_close(other.state_dict(), model.state_dict())
            torch.testing.assert_close(loaded.state_dict(), optimizer.state_dict())


class Tagged(nn.Linear):
    """A class that hears of its subclasses, and copies in its own ways."""

    made: list[type] = []

    def __init_subclass__(cls, tag: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.made.append(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tagged:
        tied = type(self)(3, 2)
        tied.load_state_dict(self.state_dict())
        tied.deep = True
        return tied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pickled": True}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x), y)


def test_hooks_and_copies_of_the_users_class_are_his_own() -> None:
    model, plain = Tagged(3, 2), Tagged(3, 2)
    training(model)(P, Q)
    assert Tagged.made == []
    for wrapped, unwrapped in (
        (copy.deepcopy(model), copy.deepcopy(plain)),
        (pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(plain))),
    ):
        assert type(wrapped) is Tagged
        assert type(wrapped._parameters) is dict
        assert vars(wrapped).keys() == vars(unwrapped).keys()
        assert torch.equal(wrapped.weight, model.weight)


@pytest.mark.parametrize("backend", few(["reference", "inductor"], "reference"))
def test_counters_of_inference_are_downloaded_on_request(backend: str) -> None:
    def count(own: Having, x: torch.Tensor) -> torch.Tensor:
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
        assert model.count == counted
        assert model.seen == seen
