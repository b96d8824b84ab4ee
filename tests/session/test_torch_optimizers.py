"""Torch's optimizers as in eager: their state, and whatever a schedule does to their numbers.

A term that was compiled out, as its number was zero, makes the next call compile; all state stays.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Graded, Twins, compilations, normal, options

X, Y = normal(8, 4), normal(8, 2, seed=1)
Maker = Callable[[Any], torch.optim.Optimizer]


def net(dropout: float = 0.0) -> nn.Module:
    """Layers with a buffer that counts and a dropout that can be switched on."""
    layers = nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(dropout)
    return Graded(body=nn.Sequential(*layers), head=nn.Linear(6, 2))


def trained(make: Maker) -> Twins:
    return Twins(net(), make, **near(8 + FUNCTION, 6))


def change(twins: Twins, **numbers: Any) -> None:
    for optimizer in twins.both:
        optimizer.param_groups[0].update(numbers)
    twins.wrapped.setOptimizer(twins.ours)


def load(twins: Twins, state: dict[str, Any]) -> None:
    for optimizer in twins.both:
        optimizer.load_state_dict(copy.deepcopy(state))


MAKERS: dict[str, Maker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-6, weight_decay=0.1),
    # A smaller eps shows rounding: eager torch in float32 is as far from float64 as this is.
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True, eps=1e-2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.spec("optimizers", 5, 18)
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_read_is_what_eager_has_and_a_resumed_run_goes_on_with_it(name: str) -> None:
    first, second = trained(MAKERS[name]), trained(MAKERS[name])
    first.step(X, Y, count=3)
    first.compare()
    theirs, ours = (optimizer.state_dict() for optimizer in first.both)
    assert ours["param_groups"] == theirs["param_groups"]
    for at, entry in theirs["state"].items():
        assert {k for k, v in entry.items() if v is not None} == ours["state"][at].keys()
    first.wrapped.detachFromDevice()
    first.compare()
    first.wrapped.destroy()
    first.ours.zero_grad()
    first.model(X, Y).backward()
    first.ours.step()  # by hand, with what the device left
    first.eager_step(X, Y)
    first.compare()
    checkpoint = copy.deepcopy((first.model.state_dict(), first.ours.state_dict()))
    second.eager, second.theirs = first.eager, first.theirs
    checkpoint[1]["param_groups"][0]["lr"] = first.theirs.param_groups[0]["lr"] = 0.02
    if name in ("Adam", "SGD"):  # there is a program, and other state on the device
        for _ in range(2):
            second.wrapped(X, Y)
    if name == "SGD":
        second.wrapped.detachFromDevice()
    second.model.load_state_dict(checkpoint[0])
    second.ours.load_state_dict(checkpoint[1])
    if name == "Adam":
        second.wrapped.copyWeightsToDevice()
    second.step(X, Y, count=3)
    second.compare()


def test_the_state_itself_can_be_read_copied_cleared_and_changed() -> None:
    twins = trained(MAKERS["Adam"])
    twins.step(X, Y, count=2)
    weight = twins.model.head.weight
    assert len(twins.ours.state) == 6
    assert weight in twins.ours.state
    theirs = twins.theirs.state[twins.eager.head.weight]["exp_avg"]
    torch.testing.assert_close(twins.ours.state[weight]["exp_avg"], theirs)
    twins.step(X, Y)
    torch.testing.assert_close(twins.ours.state[weight]["exp_avg"], theirs)
    for twin in (copy.copy(twins.ours.state), pickle.loads(pickle.dumps(twins.ours)).state):
        assert (type(twin).__name__, len(twin)) == ("defaultdict", 6)
    for optimizer in twins.both:
        optimizer.state.clear()
    twins.step(X, Y, count=2)
    twins.compare()
    load(twins, trained(MAKERS["Adam"]).theirs.state_dict())  # of before any step
    twins.step(X, Y, count=2)
    twins.compare()
    twins.step(X, Y, count=3)
    for edit in (
        lambda state: state["exp_avg"].zero_(),
        lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"])),
        lambda state: state["step"].fill_(0.0),
    ):
        for attached in (True, False):
            if not attached:
                twins.wrapped.detachFromDevice()
            for optimizer in twins.both:
                for entry in optimizer.state.values():
                    edit(entry)
            twins.step(X, Y, count=2)
            twins.compare()


def test_a_step_by_hand_counts_and_a_change_of_what_was_read_earlier_is_said_once(caplog) -> None:
    twins = trained(MAKERS["Adam"])
    twins.step(X, Y)
    twins.ours.zero_grad()  # a step by hand moves weights and moments on the host; both go up
    twins.model.forward(X, Y).backward()
    twins.ours.step()
    twins.wrapped.copyWeightsToDevice()
    twins.eager_step(X, Y)
    twins.step(X, Y)
    old = [entry["exp_avg"] for entry in twins.ours.state.values()]
    twins.step(X, Y)
    assert not caplog.records
    for tensor in old:
        tensor.zero_()
    twins.step(X, Y, count=2)  # eager's were not changed
    assert caplog.text.count("the device does not see this") == 1
    twins.compare()


SCHEDULES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]]] = {
    "OneCycle": ("Adam", lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9)),
    "OneCycle to zero": (
        "SGD", lambda o: lr_scheduler.OneCycleLR(o, 0.05, 9, base_momentum=0.0, max_momentum=0.9)),
    "Plateau": ("AdamW", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_give_eagers_numbers_step_by_step(schedule: str) -> None:
    name, make = SCHEDULES[schedule]
    twins = trained(MAKERS[name])
    schedules = [make(optimizer) for optimizer in twins.both]
    twins.wrapped.setOptimizer(twins.ours)
    with compilations() as programs:
        for _ in range(8):
            twins.step(X, Y)
            for scheduler in schedules:
                scheduler.step(*((1.0,) if schedule == "Plateau" else ()))
            twins.wrapped.setOptimizer(twins.ours)
    twins.compare()
    assert len(programs) == 1


# What is changed before each of some pairs of steps, and how many programs that takes.
CHANGES: list[tuple[Maker, str, list[dict[str, Any]], int]] = [
    (MAKERS["plain"], "attached", [
        {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.0},
        {"dampening": 0.5}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.0},
        {"nesterov": True}, {"nesterov": False}], 8),
    (lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5), "other mode",
     [{"momentum": 0.9}, {"dampening": 0.25}], 2),
    (MAKERS["Adam"], "detached", [{"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-4}], 2),
    (MAKERS["RMSprop"], "attached", [{"momentum": 0.0}, {"momentum": 0.5}], 3),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make, way, changes, number", CHANGES)
@pytest.mark.spec("executor", 61)
def test_a_term_that_was_compiled_out_comes_in_with_all_state_kept(make, way, changes, number):
    twins = trained(make)
    with compilations() as programs:
        twins.step(X, Y, count=2)
        for numbers in changes:
            if way == "detached":
                twins.wrapped.detachFromDevice()
            change(twins, **numbers)
            if way == "other mode":
                twins.train(not twins.model.training)
            twins.step(X, Y, count=2)
            twins.compare()
    if way != "other mode":
        assert len(programs) == number


@pytest.mark.slow
def test_it_is_said_and_the_loaded_state_too_changes_the_program(caplog) -> None:
    """``load_state_dict`` brings numbers along, and with them, a term that was compiled out."""
    donor, twins = (trained(MAKERS["SGD"]), trained(MAKERS["plain"]))
    donor.step(X, Y, count=2)
    twins.step(X, Y)
    load(twins, donor.ours.state_dict())
    with compilations() as programs, caplog.at_level("INFO", "poptorch::python"):
        twins.step(X, Y, count=2)
    assert caplog.text.count("compiling again, with its state kept") == 1
    twins.compare()
    assert len(programs) == 1


@pytest.mark.parametrize("numbers", [{"lr": 0.01}, {"dampening": 0.5, "weight_decay": 0.1}])
def test_a_new_optimizer_goes_on_with_the_moments(numbers: dict[str, float]) -> None:
    """The first one, if it comes back, brings its own and shows what the device has then."""
    twins = trained(MAKERS["SGD"])
    twins.step(X, Y, count=2)
    first, then = twins.ours, copy.deepcopy(twins.ours.state_dict())
    settings = {"lr": 0.05, "momentum": 0.9, **numbers}
    twins.ours = torch.optim.SGD(twins.model.parameters(), **settings)
    twins.wrapped.setOptimizer(twins.ours)
    twins.theirs.param_groups[0].update(numbers)
    twins.step(X, Y, count=3)
    twins.compare()
    twins.ours = first
    twins.wrapped.setOptimizer(first)
    twins.theirs.load_state_dict(then)
    twins.step(X, Y)
    twins.compare()


def test_several_optimizers_have_numbers_and_state_of_their_own() -> None:
    """One is loaded while the device has newer state of the other."""
    ours = net()
    models = ours, copy.deepcopy(ours)
    of_both = [[MAKERS["Adam"](part.parameters()) for part in (m.body, m.head)] for m in models]
    wrapped = poptorch.trainingModel(ours, options(), of_both[0])
    for step in range(4):
        state = copy.deepcopy(of_both[1][1].state_dict())  # eager's, so that nothing is read
        for optimizers in of_both:
            if step == 1:
                optimizers[0].param_groups[0]["lr"] = 0.01
            if step == 3:
                state["state"][0]["exp_avg"].zero_()
                optimizers[1].load_state_dict(state)
        wrapped.setOptimizer(of_both[0])
        wrapped(X, Y)
        models[1](X, Y).backward()
        for optimizer in of_both[1]:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state_dict(), models[1].state_dict())
    for mine, theirs in zip(*of_both, strict=True):
        there = theirs.state_dict()["state"]
        torch.testing.assert_close(mine.state_dict()["state"], there, **near(8 + FUNCTION, 6))


@pytest.mark.parametrize("make, got", [
    (lambda a, b: [], "none"),
    (lambda a, b: [torch.optim.Adam(a), torch.optim.AdamW(b)], "Adam, AdamW"),
    (lambda a, b: [poptorch.optim.SGD(p, lr=0.1) for p in (a, b)], "SGD of poptorch"),
    (lambda a, b: [torch.optim.Adam(a), torch.optim.Adam(a + b)], "4 parameters"),
])  # fmt: skip
def test_optimizers_that_do_not_go_together_are_refused(make, got: str) -> None:
    model = net()
    parts = [[*part.parameters()] for part in (model.body, model.head)]
    with pytest.raises(poptorch.Error, match=got):
        poptorch.trainingModel(model, options(), make(*parts))


@pytest.mark.slow
def test_the_random_sequence_goes_on() -> None:
    losses = []
    for changed in (False, True):
        torch.manual_seed(0)
        twins = Twins(net(dropout=0.5), lambda p: torch.optim.SGD(p, 0.0), options().randomSeed(3))
        twins.wrapped(X, Y)
        change(twins, **({"momentum": 0.9} if changed else {}))
        losses.append([twins.wrapped(X, Y).item() for _ in range(3)])
    assert (losses[0], len(set(losses[0]))) == (losses[1], 3)


def test_a_structural_change_waits_for_set_optimizer_or_is_refused(caplog) -> None:
    twins = trained(MAKERS["plain"])
    with compilations() as programs:
        twins.step(X, Y)
        twins.ours.param_groups[0]["momentum"] = 0.9
        twins.step(X, Y)  # eager's was not changed
    assert "momentum of the optimizer's group 0 was 0 and is 0.9" in caplog.text
    assert len(programs) == 1
    twins = trained(MAKERS["SGD"])
    twins.step(X, Y)
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        change(twins, momentum=0.0, nesterov=True)
    change(twins, momentum=0.9, nesterov=False)
    twins.step(X, Y)
    twins.compare()


@pytest.mark.parametrize("name", MAKERS)
def test_double_precision_is_that_of_numbers_and_moments_too(name: str) -> None:
    opts = options(accumulation=3)
    running = poptorch.MeanReductionStrategy.Running
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
    opts.Precision.narrow64Bit(False)
    twins = Twins(net().double(), MAKERS[name], opts, **near(8 + FUNCTION, 6, dtype=torch.float64))
    whole = X.double(), Y.double()
    for _ in range(3):
        got = twins.wrapped(*(x.repeat(3, 1) for x in whole))
        torch.testing.assert_close(got, twins.eager_step(*whole), **twins.close)
