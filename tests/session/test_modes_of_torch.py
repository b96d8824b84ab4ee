"""Every transfer is all or nothing, and works under every mode that torch may be in."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import every_pair
from helpers.closeness import FUNCTION, near
from helpers.modes import MODES
from helpers.wrapping import EagerPair, Graded, normal, options
from poptorch._session.weights.store import StateStore

X, Y = normal(4, 4), normal(4, 3, seed=1)
MAKERS = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.1, eps=1e-3),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=0.1),
}
CLOSE = near(8 + FUNCTION, 6)


def net() -> Graded:
    return Graded(norm=nn.BatchNorm1d(4), tanh=nn.Tanh(), head=nn.Linear(4, 3))


def trained(make: Callable = MAKERS["Adam"]) -> EagerPair:
    pair = EagerPair(net(), make, **CLOSE)
    pair.step(X, Y, count=2)
    return pair


def attach_again(pair: EagerPair, folder: Path) -> None:
    pair.wrapped.detachFromDevice()
    pair.wrapped.attachToDevice()


def upload(pair: EagerPair, folder: Path) -> None:
    pair.wrapped.copyWeightsToHost()
    pair.wrapped.copyWeightsToDevice()


def load_own_weights(pair: EagerPair, folder: Path) -> None:
    pair.wrapped.load_state_dict(copy.deepcopy(pair.model.state_dict()))


def load_own_state(pair: EagerPair, folder: Path) -> None:
    pair.ours.load_state_dict(copy.deepcopy(pair.ours.state_dict()))


def continue_random_numbers(pair: EagerPair, folder: Path) -> None:
    pair.wrapped.rng_state = pair.wrapped.rng_state


EVENTS: dict[str, Callable[[EagerPair, Path], Any]] = {
    "a read of the optimizer's state": lambda pair, _: pair.ours.state_dict(),
    "a read of weights": lambda pair, _: [p + 0 for p in pair.model.parameters()],
    "state_dict()": lambda pair, _: pair.model.state_dict(),
    "deepcopy": lambda pair, _: copy.deepcopy(pair.model),
    "detachFromDevice()": lambda pair, _: pair.wrapped.detachFromDevice(),
    "attachToDevice()": attach_again,
    "destroy()": lambda pair, _: pair.wrapped.destroy(),
    "copyWeightsToDevice()": upload,
    "setOptimizer()": lambda pair, _: pair.wrapped.setOptimizer(pair.ours),
    "load_state_dict()": load_own_weights,
    "load_state_dict() of the optimizer": load_own_state,
    "save()": lambda pair, folder: pair.wrapped.save(folder / "model"),
    "rng_state": continue_random_numbers,
    "another wrapper": lambda pair, _: poptorch.inferenceModel(pair.model, options()),
}


@pytest.mark.parametrize(("event", "mode"), every_pair(EVENTS, MODES))
def test_training_continues_after_an_event_under_a_mode(
    event: Callable[..., Any], mode: Callable[..., Any] | type, tmp_path: Path
) -> None:
    pair = trained()
    with mode():
        event(pair, tmp_path)
    pair.step(X, Y, count=2)
    pair.compare()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_steps_that_are_counted_on_the_host_are_counted_under_a_mode(
    mode: Callable[..., Any] | type, tmp_path: Path
) -> None:
    pair = trained(MAKERS["RMSprop"])
    with mode():
        pair.ours.state_dict()
        attach_again(pair, tmp_path)
    pair.step(X, Y)
    pair.compare()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODES if name != "saved_tensors_hooks"])
def test_a_loaded_file_is_compiled_under_a_mode(name: str, tmp_path: Path) -> None:
    """Hooks of saved tensors are part of what is captured: those of ``MODES`` refuse it."""
    pair = trained()
    pair.wrapped.save(tmp_path / "model")
    model = net()
    pair.ours = MAKERS["Adam"](model.parameters())
    with MODES[name]():
        given = {"model": model, "optimizer": pair.ours}
        pair.wrapped = poptorch.load(tmp_path / "model", **given)
    pair.model = model
    pair.step(X, Y, count=2)
    pair.compare()


def test_a_buffer_that_was_created_in_inference_mode_gets_trained_values() -> None:
    model = net()
    with torch.inference_mode():
        model.norm.running_mean = torch.zeros(4)
    executor = poptorch.trainingModel(model, options(), MAKERS["Adam"](model.parameters()))
    executor(X, Y)
    executor.destroy()
    eager = nn.BatchNorm1d(4)
    eager(X)
    torch.testing.assert_close(model.norm.running_mean.clone(), eager.running_mean.clone())


def fails(*_: object, **__: object) -> None:
    raise MemoryError("planted")


STEPS_OF_DETACHING = [(StateStore, "download"), (StateStore, "device_only")]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), STEPS_OF_DETACHING, ids=lambda each: str(each))
@pytest.mark.parametrize("event", ["detachFromDevice", "destroy"])
def test_a_device_that_cannot_be_released_continues_to_work(
    event: str, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained()
    with monkeypatch.context() as planted, pytest.raises(MemoryError, match="planted"):
        planted.setattr(owner, name, fails)
        getattr(pair.wrapped, event)()
    pair.step(X, Y, count=2)
    pair.compare()
    getattr(pair.wrapped, event)()
    pair.step(X, Y)
    pair.compare()


def test_state_that_cannot_be_read_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = trained(MAKERS["RMSprop"])
    with monkeypatch.context() as planted, pytest.raises(MemoryError, match="planted"):
        planted.setattr(StateStore, "readable", fails)
        pair.ours.state_dict()
    pair.step(X, Y)
    pair.compare()


@pytest.mark.parametrize("name", ["write_hypers", "write"])
def test_a_device_that_cannot_be_attached_is_attached_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained()
    pair.wrapped.detachFromDevice()
    with monkeypatch.context() as planted, pytest.raises(MemoryError, match="planted"):
        planted.setattr(StateStore, name, fails)
        pair.wrapped(X, Y)
    assert not pair.wrapped.isAttachedToDevice()
    pair.step(X, Y, count=2)
    pair.compare()


def without_memory(layer: nn.Module) -> None:
    layer.bias.untyped_storage().resize_(0)


def on_meta(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(layer.bias.to("meta"))


@pytest.mark.parametrize("spoil", [without_memory, on_meta], ids=["without memory", "meta"])
@pytest.mark.filterwarnings("ignore")
def test_copying_weights_to_the_device_copies_none_if_one_cannot_be_read(
    spoil: Callable[..., Any],
) -> None:
    pair = trained()
    last = pair.model.head
    before = {name: value.clone() for name, value in pair.model.state_dict().items()}
    bias = last.bias
    with torch.no_grad():
        pair.model.norm.weight.zero_()
    spoil(last)

    with pytest.raises(poptorch.Error, match="cannot be read"):
        pair.wrapped.copyWeightsToDevice()

    last.bias = bias
    bias.untyped_storage().resize_(bias.nbytes)
    pair.model.load_state_dict(before)
    pair.step(X, Y, count=2)
    pair.compare()


def test_a_state_of_another_shape_can_be_replaced_by_the_right_one() -> None:
    pair = trained()
    pair.wrapped.detachFromDevice()
    right = copy.deepcopy(pair.ours.state_dict())
    wrong = copy.deepcopy(right)
    wrong["state"][0]["exp_avg"] = torch.zeros(9)
    pair.ours.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="wrong shape"):
        pair.wrapped(X, Y)
    pair.ours.load_state_dict(right)
    pair.step(X, Y, count=2)
    pair.compare()
