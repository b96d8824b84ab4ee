"""Layers and weights that are replaced, moved or taken out after a call.

A tensor keeps what was trained in it, wherever the user puts it, and whatever takes its place.
"""

import copy
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import every_pair
from helpers.closeness import FUNCTION, near
from helpers.wrapping import PAUSE, EagerPair, compilations, normal, options
from poptorch._session.host_changes import periodic_checks

X, Y = normal(4, 4), normal(4, 3, seed=1)
NOT_FOLLOWED = "The compiled program does not follow what changed on the host: "
CLOSE = near(8 + FUNCTION, 4)
adam = functools.partial(torch.optim.Adam, lr=0.1, eps=1e-3)


@pytest.fixture(autouse=True)
def checks_are_never_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_checks, "CHEAP", 60.0)


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.middle, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.head.weight = self.middle.weight

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.middle(torch.tanh(self.body(self.norm(x)))))
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(itertools.chain(model.named_parameters(), model.named_buffers()))


def swap(model: nn.Module) -> None:
    model.middle, model.head = model.head, model.middle


def move(model: nn.Module) -> None:
    model.classifier = model.head
    del model.head


REPLACEMENTS: dict[str, Callable] = {
    "a layer": lambda m: setattr(m, "head", nn.Linear(3, 3)),
    "a layer of another shape": lambda m: setattr(m, "head", nn.Linear(3, 8)),
    "a parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(3, 3))),
    "a parameter of another shape": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(8, 3)))
    ),
    "a layer that is gone": lambda m: delattr(m, "head"),
    "a parameter that is gone": lambda m: delattr(m.head, "bias"),
    "a parameter that is none": lambda m: setattr(m.head, "bias", None),
    "layers that change places": swap,
    "a layer under another name": move,
    "a layer in another one": lambda m: setattr(m, "head", nn.Sequential(m.head, nn.ReLU())),
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(4)),
    "a buffer of another shape": lambda m: setattr(m, "norm", nn.BatchNorm1d(7)),
    "a layer that comes": lambda m: setattr(m, "extra", nn.Linear(2, 2)),
    "a weight that gets tied": lambda m: setattr(m.head, "weight", m.middle.weight),
}
READINGS: dict[str, Callable] = {
    "itself": lambda m, t: None,
    "destroy()": lambda m, t: t.destroy(),
    "destroy() of the model": lambda m, t: m.destroy(),
    "detachFromDevice()": lambda m, t: t.detachFromDevice(),
    "copyWeightsToHost()": lambda m, t: t.copyWeightsToHost(),
    "state_dict()": lambda m, t: m.state_dict(),
    "deepcopy": lambda m, t: copy.deepcopy(m),
    "another wrapper": lambda m, t: poptorch.inferenceModel(m, options()),
}


def check_replaced(pair: EagerPair, replace: Callable, read: Callable, calls: int) -> None:
    """Replace something after two calls; compare the tensors that there were with eager's."""
    trained, expected = tensors(pair.model), tensors(pair.eager)
    pair.step(X, Y, count=2)
    replace(pair.model)
    others = {
        name: each
        for name, each in tensors(pair.model).items()
        if all(each is not known for known in trained.values())
    }
    given = {name: each.detach().clone() for name, each in others.items()}
    pair.step(X, Y, count=calls)

    read(pair.model, pair.wrapped)

    torch.testing.assert_close(trained, expected, **CLOSE)
    torch.testing.assert_close(dict(others), given, rtol=0, atol=0)
    pair.wrapped.destroy()
    assert type(pair.model) is Net


@pytest.mark.parametrize(("read", "replace"), every_pair(READINGS, REPLACEMENTS))
def test_each_tensor_has_its_trained_values(
    replace: Callable[..., Any], read: Callable[..., Any]
) -> None:
    for calls in (0, 1):
        check_replaced(EagerPair(Net(), adam, **CLOSE), replace, read, calls)


@pytest.mark.slow
@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_untied_weights_have_separate_values(read: Callable[..., Any]) -> None:
    def untie(model: nn.Module) -> None:
        model.head.weight = nn.Parameter(model.middle.weight.detach().clone())

    for calls in (0, 1):
        check_replaced(EagerPair(Net(tied=True), adam, **CLOSE), untie, read, calls)


def test_data_of_another_shape_does_not_get_the_trained_values() -> None:
    model = Net()
    executor = poptorch.trainingModel(model, options(), adam(model.parameters()))
    executor(X, Y)
    model.head.weight.data = torch.ones(8, 3)
    executor(X, Y)
    executor.destroy()
    assert torch.equal(model.head.weight, torch.ones(8, 3))


EXPECTED_TEXT = {
    "a layer": "layers (Net.head)",
    "a parameter": "'head.weight' on the host, but the device continues to use its own values",
    "a parameter of another shape": "'head.weight' on the host, but the device continues to use",
    "a parameter that is gone": "'head.bias' was removed, but the device continues to use it",
    "a parameter that is none": "'head.bias' was removed, but the device continues to use it",
    "layers that change places": "layers (some were removed)",
    "a buffer": "'norm.running_mean' on the host, but the device continues to use its own values",
    "a weight that gets tied": "'head.weight' on the host",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", EXPECTED_TEXT)
def test_one_warning_names_replaced_layers(what: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    executor = poptorch.trainingModel(model, options(), adam(model.parameters()))
    executor(X, Y)
    REPLACEMENTS[what](model)
    for _ in range(3):
        time.sleep(PAUSE)
        executor(X, Y)
    (message,) = [text for text in caplog.messages if NOT_FOLLOWED in text]
    assert EXPECTED_TEXT[what] in message or what == "layers that change places"


def test_a_warning_names_untied_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    executor = poptorch.trainingModel(model, options(), adam(model.parameters()))
    executor(X, Y)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for _ in range(2):
        time.sleep(PAUSE)
        executor(X, Y)
    (message,) = [text for text in caplog.messages if NOT_FOLLOWED in text]
    assert "'head.weight' on the host, but the device continues to use its own values" in message


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("executor", ["the same executor", "another one"])
def test_transfer_learning_trains_the_new_layer_as_eager_does(size: int, executor: str) -> None:
    pair = EagerPair(Net(), adam, **CLOSE)
    pair.step(X, Y, count=2)
    old = pair.model.head
    new = nn.Linear(3, size)
    for model in (pair.model, pair.eager):
        model.head = copy.deepcopy(new)
    pair.wrapped.destroy()
    kept = old.weight.detach().clone()
    pair.theirs, pair.ours = (adam(m.parameters()) for m in (pair.eager, pair.model))
    if executor == "another one":
        pair.wrapped = poptorch.trainingModel(pair.model, options(), pair.ours)
    else:
        pair.wrapped.setOptimizer(pair.ours)
    pair.step(X, normal(4, size), count=2)
    pair.compare()
    assert torch.equal(old.weight, kept)


def test_a_program_for_another_mode_has_the_current_layers() -> None:
    pair = EagerPair(Net(), adam, **CLOSE)
    pair.step(X, Y, count=2)
    old = pair.model.head, pair.eager.head
    new = nn.Linear(3, 3)
    for model in (pair.model, pair.eager):
        model.head = copy.deepcopy(new)
        model.norm.eval()
    pair.step(X, Y, count=2)  # which eager trains without the new layer, too
    pair.compare()
    torch.testing.assert_close(old[0].state_dict(), old[1].state_dict(), **CLOSE)


def test_moments_go_with_layers_that_change_places() -> None:
    pair = EagerPair(Net(), adam, **CLOSE)
    pair.step(X, Y, count=2)
    with compilations() as programs:
        for model in (pair.model, pair.eager):
            swap(model)
            model.norm.eval()
        pair.step(X, Y, count=2)
    pair.compare()
    assert len(programs) == 1


def test_a_program_with_replaced_layers_is_not_used_again() -> None:
    pair = EagerPair(Net(), adam, **CLOSE)
    pair.step(X, Y)
    for model in (pair.model, pair.eager):
        swap(model)
        model.norm.eval()
    pair.step(X, Y)
    with compilations() as programs:
        for model in (pair.model, pair.eager):
            model.norm.train()
        pair.step(X, Y, count=2)
    pair.compare()
    assert len(programs) == 1


def test_a_removed_layer_is_an_ordinary_module_after_destroy() -> None:
    model = Net()
    executor = poptorch.trainingModel(model, options(), adam(model.parameters()))
    executor(X, Y)
    old, model.head = model.head, nn.Linear(3, 3)
    executor.destroy()
    assert type(old._parameters) is dict
    assert type(old.weight) is nn.Parameter


@pytest.mark.parametrize("size", [3, 5])
def test_moments_of_ours_do_not_go_to_another_layer_of_the_name(size: int) -> None:
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    executor(X, Y)
    model.head = nn.Linear(3, size)
    executor.destroy()
    optimizer.add_param_group({"params": list(model.head.parameters())})
    executor.setOptimizer(optimizer)
    target, eager = normal(4, size), copy.deepcopy(model)
    gradient = torch.autograd.grad(eager(X, target)[1], eager.head.bias)[0]

    executor(X, target)

    moment = optimizer.state_dict()["ipu_state"]["Accl1___head.bias"]
    torch.testing.assert_close(moment, 0.1 * gradient, **CLOSE)


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_with_a_replaced_layer_is_not_saved(trained: bool, tmp_path: Path) -> None:
    model = Net()
    wrap = poptorch.trainingModel if trained else poptorch.inferenceModel
    executor = wrap(model.train(trained), options())
    executor(X, Y)
    model.head = nn.Linear(3, 3)

    with pytest.raises(poptorch.Error, match=r"layers \(Net.head\)(.|\n)*destroy\(\)") as error:
        executor.save(tmp_path / "model.poptorch")

    assert "state_dict()" in str(error.value)
    assert not (tmp_path / "model.poptorch").exists()
    executor.destroy()
    executor(X, Y)
    executor.save(tmp_path / "model.poptorch")


def test_a_checkpoint_of_a_model_with_a_replaced_layer_is_not_written(tmp_path: Path) -> None:
    model = Net()
    training = poptorch.trainingModel(model, options(), adam(model.parameters()))
    checkpoints = poptorch.Checkpoints(tmp_path, training, [])
    training(X, Y)
    model.head = nn.Linear(3, 3)

    with pytest.raises(poptorch.Error, match=r"layers \(Net.head\)"):
        checkpoints.save()
