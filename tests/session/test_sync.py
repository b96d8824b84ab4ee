"""Weights on the device and on the host: who has the newer ones, and when they travel."""

import copy
import functools
import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, Twins, inference, normal, options, saved, training

X, Y = normal(4, 4), normal(4, 2, seed=1)
sgd = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.top = nn.Parameter(torch.ones(2))

    def forward(self, x, y=None):
        out = self.layer(x) * self.top
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def trained(model: nn.Module) -> poptorch.PoplarExecutor:
    executor = training(model)
    for _ in range(3):
        executor(X, Y)
    return executor


LOOKS = {
    "attribute": lambda m, t: m.layer.weight, "executor attribute": lambda m, t: t.layer.weight,
    "parameters": lambda m, t: next(iter(m.layer.parameters())),
    "named_parameters": lambda m, t: dict(m.named_parameters())["layer.weight"],
    "state_dict": lambda m, t: m.state_dict()["layer.weight"],
    "file": lambda m, t: saved(m.state_dict())["layer.weight"],
    "deepcopy": lambda m, t: copy.deepcopy(m).layer.weight, "forward": lambda m, t: m(X),
    "pickle": lambda m, t: pickle.loads(pickle.dumps(m)).layer.weight,
}  # fmt: skip


@pytest.mark.spec("executor", 4, 5, 55, 58)
@pytest.mark.spec("programs", 5)
def test_every_look_sees_trained_values() -> None:
    twins = Twins(Net(), sgd)
    for look in LOOKS.values():
        twins.step(X, Y, count=2)
        assert torch.equal(look(twins.model, twins.wrapped), look(twins.eager, twins.eager))
    assert set(twins.wrapped.plan().program.graphs) == {"step"}  # one graph holds it all


def transfers(caplog) -> list[int]:
    """How often weights have come down, and how often they have gone up."""
    ways = "from IPU to host", "from host to IPU memory"
    return [caplog.text.count(f"Writing weights {way}") for way in ways]


@pytest.mark.spec("executor", 6, 39, 57, 58, 59)
@pytest.mark.spec("programs", 6)
@pytest.mark.parametrize("first", ["training", "inference"])
def test_a_burst_of_training_comes_down_once_and_validation_refreshes_itself(first, caplog) -> None:
    caplog.set_level(logging.DEBUG, "poptorch:cpp")
    twins = Twins(Net(), sgd)
    if first == "inference":
        inference = poptorch.inferenceModel(twins.model, options())
        inference(X)
    twins.step(X, Y, count=3)
    compiled = 2 if first == "inference" else 1  # compiling uploads by itself
    assert transfers(caplog) == [0, compiled]
    if first == "training":
        inference = poptorch.inferenceModel(twins.model, options())
    for _ in range(3):
        twins.model.state_dict()
        twins.model(X)
        assert torch.equal(inference(X), twins.eager(X))
    assert transfers(caplog) == [1, compiled + 1]
    twins.step(X, Y)
    inference(X)
    inference(X)
    assert transfers(caplog) == [2, compiled + 2]
    assert not twins.wrapped.copyWeightsToHostIfNeeded()


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
    model.twin = nn.Linear(4, 2)
    model.twin.weight = weight = model.layer.weight
    before, storage = weight.clone(), weight.data_ptr()
    executor = trained(model)
    executor.copyWeightsToDevice()
    executor.copyWeightsToHost()
    assert torch.equal(weight, before)
    executor(X, Y)
    executor.copyWeightsToHost()
    assert not torch.equal(weight, before)
    assert model.twin.weight is model.layer.weight is weight  # tied weights stay tied
    state = model.state_dict()
    assert state["twin.weight"].data_ptr() == state["layer.weight"].data_ptr() == storage


@pytest.mark.spec("executor", 1, 2, 3, 36, 51, 52)
def test_wrapping_destroying_and_wrapping_again() -> None:
    twins = Twins(Net(), sgd)
    model, executor = twins.model, twins.wrapped
    twins.step(X, Y)
    assert type(model).__name__ == "PoptorchNet"
    assert isinstance(model, Net)
    assert executor.model is model
    assert poptorch.inferenceModel(executor, options()).model is not model
    executor.note = 3
    executor.destroy()
    assert not executor.isCompiled()
    assert type(model) is Net
    assert type(model.layer._parameters) is dict
    twins.compare()
    twins.step(X[:2], Y[:2])  # compiles again
    assert type(model).__name__ == "PoptorchNet"
    assert not hasattr(model, "note")  # what is assigned on the executor stays there
    executor.destroy()
    twins.wrapped = poptorch.trainingModel(model, options(), twins.ours)
    twins.step(X, Y)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        executor(X, Y)  # another one has the model now
    del executor
    gc.collect()  # and keeps it when the first one goes
    twins.step(X, Y)
    twins.compare()


def test_an_executor_may_be_collected_while_another_is_captured() -> None:
    twins = Twins(Net(), functools.partial(sgd, momentum=0.9))
    twins.step(X, Y)

    class Dropping(Net):
        def forward(self, x, y=None):
            twins.wrapped = None
            gc.collect()
            return super().forward(x, y)

    assert torch.isfinite(poptorch.trainingModel(Dropping(), options(accumulation=2))(X, Y)[1])
    twins.compare()
    assert type(twins.model) is Net


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

    def forward(model, x, y=None):
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
def test_what_is_assigned_reaches_the_device(train: bool, when: str) -> None:
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


def test_what_does_not_fit_is_refused_and_parameters_that_were_replaced_are_let_go() -> None:
    model = net()
    executor = training(model)
    executor(A, B)
    kept = model.offset
    model.offset = torch.zeros(3)
    with pytest.raises(poptorch.Error, match=r"(?s)shape of 'offset'.*\(3,\); compiled: \(2,\)"):
        executor.copyWeightsToDevice()
    model.offset = kept
    model.register_buffer("another", torch.zeros(1))
    with pytest.raises(poptorch.Error, match=r"(?s)other parameters or buffers.*another"):
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
