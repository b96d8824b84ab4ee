"""The state of torch's own optimizers: there when it is read, on the device when it is loaded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options

X, Y = normal(8, 4), normal(8, 2, seed=1)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x), y)


class Twins:
    """The same training, eager and wrapped."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.eager = Net()
        self.model = copy.deepcopy(self.eager)
        self.theirs = OPTIMIZERS[name](self.eager.parameters())
        self.ours = OPTIMIZERS[name](self.model.parameters())
        self.wrapped = poptorch.trainingModel(self.model, options(), self.ours)

    def eager_step(self) -> torch.Tensor:
        self.theirs.zero_grad()
        loss = self.eager(X, Y)
        loss.backward()
        self.theirs.step()
        return loss.detach()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            torch.testing.assert_close(self.wrapped(X, Y), self.eager_step())

    def compare(self) -> None:
        theirs, ours = (o.state_dict() for o in (self.theirs, self.ours))
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for at, entry in theirs["state"].items():
            assert {k for k, v in entry.items() if v is not None} == ours["state"][at].keys()
            for name in ours["state"][at]:
                torch.testing.assert_close(ours["state"][at][name], entry[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_read_is_what_eager_has(name: str) -> None:
    twins = Twins(name)
    twins.step(3)
    twins.compare()
    twins.step(2)
    twins.compare()
    twins.wrapped.detachFromDevice()
    twins.compare()
    twins.step()
    twins.wrapped.destroy()
    twins.compare()
    twins.ours.zero_grad()
    loss = twins.model(X, Y)
    loss.backward()
    twins.ours.step()  # by hand, with what the device left
    torch.testing.assert_close(loss.detach(), twins.eager_step())
    torch.testing.assert_close(twins.model.state_dict(), twins.eager.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("when", ["before", "after", "detached"])
def test_a_resumed_run_has_eagers_losses(name: str, when: str) -> None:
    first = Twins(name)
    first.step(3)
    checkpoint = copy.deepcopy((first.model.state_dict(), first.ours.state_dict()))
    second = Twins(name)
    second.eager, second.theirs = first.eager, first.theirs
    if when != "before":  # there is a program, and other state on the device
        for _ in range(2):
            second.wrapped(X, Y)
    if when == "detached":
        second.wrapped.detachFromDevice()
    second.model.load_state_dict(checkpoint[0])
    second.ours.load_state_dict(checkpoint[1])
    if when == "after":
        second.wrapped.copyWeightsToDevice()
    second.step(3)
    second.compare()


def test_hyper_parameters_are_loaded_too() -> None:
    twins = Twins("Adam")
    twins.step(2)
    state = copy.deepcopy(twins.theirs.state_dict())
    state["param_groups"][0]["lr"] = 0.01
    twins.theirs.load_state_dict(state)
    twins.ours.load_state_dict(state)
    twins.step(3)


def test_loading_before_any_step_starts_afresh() -> None:
    twins = Twins("Adam")
    fresh = copy.deepcopy(twins.theirs.state_dict())
    twins.step(2)
    twins.theirs.load_state_dict(copy.deepcopy(fresh))
    twins.ours.load_state_dict(fresh)
    twins.step(3)
    twins.compare()


def test_the_state_itself_can_be_read_copied_and_cleared() -> None:
    twins = Twins("Adam")
    twins.step(2)
    weight = twins.model.body[0].weight
    assert len(twins.ours.state) == 4
    assert weight in twins.ours.state
    theirs = twins.theirs.state[twins.eager.body[0].weight]["exp_avg"]
    torch.testing.assert_close(twins.ours.state[weight]["exp_avg"], theirs)
    twins.step()
    torch.testing.assert_close(twins.ours.state[weight]["exp_avg"], theirs)
    for twin in (copy.copy(twins.ours.state), pickle.loads(pickle.dumps(twins.ours)).state):
        assert type(twin).__name__ == "defaultdict"
        assert len(twin) == 4
    twins.ours.state.clear()
    twins.theirs.state.clear()
    twins.step(2)
    twins.compare()


def test_another_optimizer_goes_on_with_the_state() -> None:
    """Scripts make a new one to change the learning rate."""
    twins = Twins("SGD")
    twins.step(2)
    other = torch.optim.SGD(twins.model.parameters(), lr=0.01, momentum=0.9)
    twins.wrapped.setOptimizer(other)
    twins.theirs.param_groups[0]["lr"] = 0.01
    twins.ours = other
    twins.step(2)
    twins.compare()


def _zero(state: dict) -> None:
    state["exp_avg"].zero_()


def _replace(state: dict) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _start_again(state: dict) -> None:
    state["step"].fill_(0.0)


@pytest.mark.parametrize("edit", [_zero, _replace, _start_again])
@pytest.mark.parametrize("detached", [False, True])
def test_what_is_changed_in_the_state_reaches_the_device(edit, detached: bool) -> None:
    twins = Twins("Adam")
    twins.step(3)
    if detached:
        twins.wrapped.detachFromDevice()
    for optimizer in (twins.ours, twins.theirs):
        for entry in optimizer.state.values():
            edit(entry)
    twins.step(2)
    twins.compare()
    for optimizer in (twins.ours, twins.theirs):  # and again
        for entry in optimizer.state.values():
            edit(entry)
    twins.step(2)
    twins.compare()


def test_a_change_of_what_was_read_before_the_last_call_is_said_once(caplog) -> None:
    twins = Twins("Adam")
    twins.step()
    old = [entry["exp_avg"] for entry in twins.ours.state.values()]
    twins.step()
    assert not caplog.records
    for tensor in old:
        tensor.zero_()
    twins.step(2)  # eager's were not changed
    assert caplog.text.count("the device does not see this") == 1
    twins.compare()


def test_a_step_by_hand_between_calls_counts(caplog) -> None:
    """It moves weights and moments on the host; both reach the device."""
    twins = Twins("Adam")
    twins.step(2)
    twins.ours.zero_grad()
    twins.model.forward(X, Y).backward()
    twins.ours.step()
    twins.wrapped.copyWeightsToDevice()
    twins.eager_step()
    twins.step(2)
    twins.compare()
    assert not caplog.records
