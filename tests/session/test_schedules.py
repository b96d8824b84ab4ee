"""Torch's optimizers follow whatever a schedule, or a user, does to their numbers, as eager does.

A term that was compiled out, because its number was zero, makes the next call compile again;
weights, moments, buffers, counters and random numbers go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import poptorch
from helpers.wrapped import normal, options

X, Y = normal(8, 4), normal(8, 2, seed=1)


class Net(nn.Module):
    """Layers with a buffer that counts and a dropout that can be switched on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.drop(self.body(x))), y)


class Twins:
    """The same training, eager and wrapped; counts the programs."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.eager = Net()
        self.model = copy.deepcopy(self.eager)
        self.theirs, self.ours = (make(m.parameters()) for m in (self.eager, self.model))
        self.wrapped = poptorch.trainingModel(self.model, options(), self.ours)
        self.programs: list[object] = []

    def step(self) -> None:
        loss = self.wrapped(X, Y)
        program = self.wrapped._session.now.compiled
        if program not in self.programs:
            self.programs.append(program)
        self.theirs.zero_grad()
        want = self.eager(X, Y)
        want.backward()
        self.theirs.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-4, atol=1e-6)

    def change(self, **numbers: Any) -> None:
        for optimizer in (self.theirs, self.ours):
            optimizer.param_groups[0].update(numbers)
        self.wrapped.setOptimizer(self.ours)

    def compare(self) -> None:
        torch.testing.assert_close(self.model.state_dict(), self.eager.state_dict())
        theirs, ours = (o.state_dict()["state"] for o in (self.theirs, self.ours))
        for at, entry in theirs.items():
            for name, value in entry.items():
                if value is not None:
                    torch.testing.assert_close(ours[at][name], value, rtol=1e-4, atol=1e-6)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9),
    "OneCycle to zero": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.05, total_steps=9, base_momentum=0.0, max_momentum=0.9
    ),
    "CosineAnnealing": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "WarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
    "Lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-6),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, eps=1e-4),
}


@pytest.mark.parametrize(
    "name, schedule",
    [(name, "OneCycle") for name in MAKERS if name != "AdamW"]
    + [("SGD", "OneCycle to zero"), *(("AdamW", name) for name in SCHEDULES)],
)
def test_schedules_give_eagers_numbers_step_by_step(name: str, schedule: str) -> None:
    twins = Twins(MAKERS[name])
    schedules = [SCHEDULES[schedule](o) for o in (twins.theirs, twins.ours)]
    twins.wrapped.setOptimizer(twins.ours)
    for _ in range(8):
        twins.step()
        for scheduler in schedules:
            scheduler.step()
        twins.wrapped.setOptimizer(twins.ours)
    twins.compare()
    assert len(twins.programs) == 1


def test_a_plateau_halves_the_rate() -> None:
    twins = Twins(MAKERS["SGD"])
    plateaus = [lr_scheduler.ReduceLROnPlateau(o, patience=0) for o in (twins.theirs, twins.ours)]
    for metric in (1.0, 2.0, 3.0):
        for plateau in plateaus:
            plateau.step(metric)
        twins.wrapped.setOptimizer(twins.ours)
        twins.step()
    assert twins.ours.param_groups[0]["lr"] == pytest.approx(0.0005)
    twins.compare()


# What is changed before each of some pairs of steps, and how many programs that takes.
CHANGES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], list[dict[str, Any]], int]] = {
    "SGD weight decay": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        [{"weight_decay": 0.1}, {"weight_decay": 0.2}, {"weight_decay": 0.0}],
        2,
    ),
    "SGD momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        [{"momentum": 0.9}, {"momentum": 0.5}],
        2,
    ),
    "SGD momentum and back": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        [{"momentum": 0.0}, {"momentum": 0.9}],
        3,
    ),
    "SGD dampening comes": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        [{"dampening": 0.5}, {"dampening": 0.0}],
        2,
    ),
    "SGD dampened momentum comes": (
        lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5),
        [{"momentum": 0.9}, {"dampening": 0.25}],
        2,
    ),
    "SGD nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        [{"nesterov": True}, {"nesterov": False}],
        3,
    ),
    "Adam weight decay": (
        lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6),
        [{"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-4}],
        2,
    ),
    "RMSprop momentum and back": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, eps=1e-4),
        [{"momentum": 0.0}, {"momentum": 0.5}],
        3,
    ),
}


@pytest.mark.parametrize(
    "name, way",
    [(name, "attached") for name in CHANGES]
    + [("SGD momentum and back", way) for way in ("detached", "other mode")]
    + [("Adam weight decay", "detached"), ("Adam weight decay", "other mode")],
)
@pytest.mark.spec("executor", 61)
def test_a_term_that_was_compiled_out_comes_in_with_all_state_kept(name: str, way: str) -> None:
    make, changes, programs = CHANGES[name]
    twins = Twins(make)
    twins.step()
    twins.step()
    for numbers in changes:
        if way == "detached":
            twins.wrapped.detachFromDevice()
        twins.change(**numbers)
        if way == "other mode":
            for model in (twins.model, twins.eager):
                model.train(not model.training)
        twins.step()
        twins.step()
        twins.compare()
    if way != "other mode":
        assert len(twins.programs) == programs


def test_it_is_said_and_the_loaded_state_too_changes_the_program(caplog) -> None:
    """``load_state_dict`` brings numbers along, and with them, a term that was compiled out."""
    donor, twins = (Twins(MAKERS["SGD"]), Twins(lambda p: torch.optim.SGD(p, lr=0.1)))
    donor.step()
    donor.step()
    twins.step()
    state = copy.deepcopy(donor.ours.state_dict())
    for optimizer in (twins.ours, twins.theirs):
        optimizer.load_state_dict(copy.deepcopy(state))
    with caplog.at_level("INFO", "poptorch::python"):
        twins.step()
    assert caplog.text.count("compiling again, with its state kept") == 1
    twins.step()
    twins.compare()
    assert len(twins.programs) == 2


def test_a_new_torch_optimizer_with_another_structure_goes_on_with_the_moments() -> None:
    twins = Twins(MAKERS["SGD"])
    twins.step()
    twins.ours = torch.optim.SGD(
        twins.model.parameters(), lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1
    )
    twins.wrapped.setOptimizer(twins.ours)
    twins.theirs.param_groups[0].update(dampening=0.5, weight_decay=0.1)
    for _ in range(3):
        twins.step()
    twins.compare()


@pytest.mark.slow
def test_the_random_sequence_goes_on() -> None:
    losses = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = Net(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped = poptorch.trainingModel(model, options().randomSeed(3), optimizer)
        wrapped(X, Y)
        if changed:
            optimizer.param_groups[0]["momentum"] = 0.9
            wrapped.setOptimizer(optimizer)
        losses.append([wrapped(X, Y).item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_a_change_that_cannot_be_compiled_leaves_the_program_as_it_was() -> None:
    twins = Twins(MAKERS["SGD"])
    twins.step()
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        twins.ours.param_groups[0].update(momentum=0.0, nesterov=True)
        twins.wrapped.setOptimizer(twins.ours)
    twins.ours.param_groups[0].update(momentum=0.9, nesterov=False)
    twins.step()
    twins.compare()


def test_poptorchs_optimizers_keep_poptorchs_rules() -> None:
    """What was not passed is constant, and the error says what to do; the old numbers go on."""
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(X, Y)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(poptorch.Error, match="Values are constant but do not match") as caught:
        wrapped.setOptimizer(optimizer)
    assert "pass 'momentum' to the optimizer" in str(caught.value)
    wrapped.destroy()
    wrapped.setOptimizer(optimizer)
    wrapped(X, Y)
    assert ("momentum", 0.9) in wrapped._session.now.task.optim.groups[0].settings


def test_without_set_optimizer_a_structural_change_waits_and_is_said(caplog) -> None:
    twins = Twins(lambda p: torch.optim.SGD(p, lr=0.1))
    twins.step()
    twins.ours.param_groups[0]["momentum"] = 0.9
    twins.step()  # eager's was not changed
    assert "momentum of the optimizer's group 0 was 0 and is 0.9" in caplog.text
    assert len(twins.programs) == 1
