"""Weights on the device and on the host: who has the newer ones, and when they travel."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import compilations, normal, options


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.top = nn.Parameter(torch.ones(2))

    def forward(self, x, y=None):
        out = self.layer(x) * self.top
        return out if y is None else (out, nn.functional.mse_loss(out, y))


X, Y = normal(4, 4), normal(4, 2, seed=1)


def trained(model: Net, calls: int = 3) -> poptorch.PoplarExecutor:
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(calls):
        training(X, Y)
    return training


def eagerly_trained(model: Net, calls: int = 3) -> Net:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(calls):
        optimizer.zero_grad()
        model(X, Y)[1].backward()
        optimizer.step()
    return model


LOOKS = {
    "attribute": lambda m, t: m.layer.weight,
    "executor attribute": lambda m, t: t.layer.weight,
    "parameters": lambda m, t: next(iter(m.layer.parameters())),
    "named_parameters": lambda m, t: dict(m.named_parameters())["layer.weight"],
    "state_dict": lambda m, t: m.state_dict()["layer.weight"],
    "deepcopy": lambda m, t: copy.deepcopy(m).layer.weight,
    "forward": lambda m, t: m(X),
    "pickle": lambda m, t: pickle.loads(pickle.dumps(m)).layer.weight,
}


@pytest.mark.spec("executor", 4, 5, 58)
@pytest.mark.spec("programs", 5)
@pytest.mark.parametrize("look", LOOKS)
def test_every_look_sees_trained_values(look: str) -> None:
    model = Net()
    expected = eagerly_trained(model)
    training = trained(model)
    assert torch.equal(LOOKS[look](model, training), LOOKS[look](expected, expected))


@pytest.fixture
def transfers(monkeypatch):
    """Counts transfers of each executor through its public methods."""
    counts = {"Host": 0, "Device": 0}
    for where in counts:
        name = f"copyWeightsTo{where}"
        function = getattr(poptorch.PoplarExecutor, name)

        def counted(self, where=where, function=function):
            counts[where] += 1
            function(self)

        monkeypatch.setattr(poptorch.PoplarExecutor, name, counted)
    return counts


@pytest.mark.spec("executor", 6, 57, 58, 59)
def test_one_download_per_burst_of_training(transfers) -> None:
    model = Net()
    training = trained(model, calls=5)
    assert transfers == {"Host": 0, "Device": 0}
    for _ in range(10):
        model.state_dict()
        model(X)
    assert transfers == {"Host": 1, "Device": 0}
    training(X, Y)
    assert not training.copyWeightsToHostIfNeeded() or transfers["Host"] == 2
    assert not training.copyWeightsToHostIfNeeded()


@pytest.mark.spec("executor", 39)
@pytest.mark.parametrize("first", ["training", "inference"])
@pytest.mark.spec("programs", 6)
def test_validation_refreshes_itself(first: str, transfers) -> None:
    model = Net()
    if first == "inference":
        inference = poptorch.inferenceModel(model, options())
        inference(X)
    expected = eagerly_trained(model)
    training = trained(model)
    if first == "training":
        inference = poptorch.inferenceModel(model, options())
    for _ in range(3):
        assert torch.allclose(inference(X), expected(X))
    uploads = 1 if first == "inference" else 0  # compiling uploads by itself
    assert transfers == {"Host": 1, "Device": uploads}
    training(X, Y)
    inference(X)
    inference(X)
    assert transfers == {"Host": 2, "Device": uploads + 1}


@pytest.mark.spec("executor", 7)
def test_host_edits_wait_for_an_explicit_copy() -> None:
    model = Net()
    inference = poptorch.inferenceModel(model, options())
    before = inference(X)
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(inference(X), before)
    inference.copyWeightsToDevice()
    assert not torch.equal(inference(X), before)
    inference.load_state_dict(Net().state_dict())
    assert torch.allclose(inference(X), model(X))


@pytest.mark.spec("executor", 8, 9, 68)
def test_uploading_discards_progress_and_host_tensors_keep_identity_and_storage() -> None:
    model = Net()
    weight, storage = model.layer.weight, model.layer.weight.data_ptr()
    before = weight.clone()
    training = trained(model)
    training.copyWeightsToDevice()
    training.copyWeightsToHost()
    assert torch.equal(weight, before)
    training(X, Y)
    training.copyWeightsToHost()
    assert not torch.equal(weight, before)
    assert model.layer.weight is weight
    assert weight.data_ptr() == storage


@pytest.mark.spec("executor", 1, 2, 3, 52)
def test_wrapping_and_unwrapping() -> None:
    model = Net()
    training = trained(model)
    assert type(model).__name__ == "PoptorchNet"
    assert isinstance(model, Net)
    assert training.model is model
    for _ in range(2):
        assert poptorch.inferenceModel(training, options()).model is not model
    weight = model.layer.weight.clone()
    training.destroy()
    assert type(model) is Net
    assert type(model.layer._parameters) is dict
    assert torch.equal(model.layer.weight, weight)
    again = trained(model)
    kept = poptorch.inferenceModel(model, options())
    del kept  # an inference executor that goes leaves the training wrapping alone
    assert type(model).__name__ == "PoptorchNet"
    del training, again
    assert torch.isfinite(model(X)).all()


def test_copies_and_pickles_are_ordinary_modules() -> None:
    model = Net()
    training = trained(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Net
        assert type(twin._parameters) is dict
        assert torch.equal(twin.top, model.top)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["layer.weight"], model.layer.weight)
    shallow = copy.copy(model)
    training(X, Y)
    assert torch.equal(shallow.layer.weight, model.layer.weight)


@pytest.mark.spec("executor", 36, 51)
def test_a_destroyed_executor_compiles_again() -> None:
    model = Net()
    training = trained(model)
    training.note = 3
    training.destroy()
    assert not training.isCompiled()
    training(X[:2], Y[:2])
    assert training.isCompiled()
    assert type(model).__name__ == "PoptorchNet"
    assert not hasattr(model, "note")  # what is assigned on the executor stays there


@pytest.mark.spec("executor", 55)
def test_one_compile_for_the_whole_of_training() -> None:
    events = []
    pre = poptorch.registerPreCompileHook(lambda: events.append("pre"))
    with compilations() as events_after:
        training = trained(Net(), calls=20)
    pre.remove()
    assert (events, events_after) == (["pre"], [1])
    assert set(training.plan().program.graphs) == {"step"}  # one graph holds it all
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


@pytest.mark.spec("executor", 53)
def test_tied_weights_stay_tied() -> None:
    model = Net()
    model.twin = nn.Linear(4, 2)
    model.twin.weight = model.layer.weight
    trained(model)
    assert model.twin.weight is model.layer.weight
    state = model.state_dict()
    assert state["twin.weight"].data_ptr() == state["layer.weight"].data_ptr()


def test_an_executor_may_be_collected_while_another_is_captured() -> None:
    doomed = Net()
    expected = eagerly_trained(doomed)
    executors = [trained(doomed)]

    class Dropping(Net):
        def forward(self, x, y=None):
            executors.clear()
            return super().forward(x, y)

    model = Dropping()
    assert torch.isfinite(trained(model, calls=1)(X, Y)[1])
    assert torch.equal(doomed.layer.weight, expected.layer.weight)
    assert type(doomed) is Net


def test_gradients_of_the_hosts_own_are_forgotten_and_move_no_weights() -> None:
    model = Net()
    parameters = [*model.parameters()]
    training = trained(model)
    training.setOptimizer(torch.optim.SGD(parameters, lr=0.05))
    model.zero_grad()
    assert training.copyWeightsToHostIfNeeded()
    (model.top * 2).sum().backward()
    assert model.top.grad is not None
    model.zero_grad(set_to_none=False)
    assert torch.equal(model.top.grad, torch.zeros(2))


@pytest.mark.spec("parallel", 47)
def test_an_executor_is_saved_before_it_is_compiled() -> None:
    model = Net()
    expected = copy.deepcopy(model)(X, Y)[1].detach()
    poptorch.BeginBlock(model.layer, "A", ipu_id=1)
    training = poptorch.trainingModel(model, options(accumulation=4))
    buffer = io.BytesIO()
    torch.save(training, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(loaded(X.repeat(4, 1), Y.repeat(4, 1))[1], expected)
    assert [stage.chip for stage in loaded.plan().layout.stages if "A" in stage.blocks] == [1]
    assert not training.isCompiled()
