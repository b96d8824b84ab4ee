"""The optimizer of a wrapped model: when it is read, its state, and torch's own as in eager.

A term that was compiled out, as its number was zero, makes the next call compile; all state stays.
"""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Graded, Scaled, compilations, normal, options, saved
from helpers.wrapping import Regression as Net

X, Y = normal(4, 4), normal(4, 2, seed=1)
WEIGHT = "Accl1___layer.weight"


def wrapped(model: Net, optimizer: torch.optim.Optimizer | None = None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options(), optimizer)


def adam(lr: float = 0.01) -> tuple[Graded, torch.optim.Adam, poptorch.PoplarExecutor]:
    """A model, its optimizer, and the executor of both."""
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=lr)
    return model, optimizer, wrapped(model, optimizer)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return optimizer.state_dict()["ipu_state"]


OPTIMIZERS = {
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "combined": lambda p: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=3.0, weight_decay=0.07
    ),
    "AdamW": lambda p: poptorch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.999), eps=1e-7),
    "RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01, max_weight_norm=3.3),
}


@pytest.mark.slow
@pytest.mark.spec("optimizers", 18, 19, 20)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_detaching_and_destroying_continue_bit_for_bit(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    training = wrapped(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        training(X, Y)
        training.setOptimizer(optimizer)
    scheduler.step()
    training.setOptimizer(optimizer)
    checkpoint, restored = (
        saved({"model": model.state_dict(), "opt": optimizer.state_dict()}),
        Net(),
    )
    restored.load_state_dict(checkpoint["model"])
    fresh = OPTIMIZERS[name](restored.parameters())
    fresh.load_state_dict(checkpoint["opt"])
    rewrapped = wrapped(restored, fresh)
    expected, losses = [rewrapped(X, Y) for _ in range(4)], [training(X, Y)]
    training.detachFromDevice()
    losses += [training(X, Y) for _ in range(2)]
    training.destroy()
    training = wrapped(model, optimizer)
    assert [*losses, training(X, Y)] == expected
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)
    rate = optimizer.param_groups[0]["lr"]
    assert fresh.param_groups[0]["lr"] == rate
    # Rebuilt at epoch 1 it makes the step to epoch 2, from the stored rate.
    torch.optim.lr_scheduler.StepLR(fresh, 1, gamma=0.5, last_epoch=scheduler.last_epoch)
    assert fresh.param_groups[0]["lr"] == rate / 2


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
def test_before_compiling_the_optimizer_has_no_state() -> None:
    _, optimizer, _ = adam()

    state = optimizer.state_dict()

    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    assert not optimizer.has_state()


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
def test_compiling_gives_the_optimizer_moments_of_zero_and_its_numbers() -> None:
    _, optimizer, training = adam(lr=0.01)

    training.compile(X, Y)

    state = optimizer.state_dict()
    assert not state["ipu_state"][WEIGHT].any()
    assert state["ipu_param"]["learningRate___specific___layer.weight"] == torch.tensor(0.01)


# By name: what is changed in a state, the class of the error, and its message.
WRONG_STATES: dict[str, tuple[Any, type[Exception], str]] = {
    "torch's": (
        lambda state, native: native,
        RuntimeError,
        "Only IPU optimizer states can be loaded",
    ),
    "no dictionary": (
        lambda state, native: {**state, "ipu_state": 3},
        RuntimeError,
        "Only IPU optimizer states can be loaded",
    ),
    "without numbers": (
        lambda state, native: {**native, "ipu_state": {}},
        RuntimeError,
        "Only IPU optimizer states can be loaded",
    ),
    "empty": (lambda state, native: {}, RuntimeError, "because it is empty"),
    "none": (lambda state, native: None, RuntimeError, "because it is empty"),
    "more groups": (
        lambda state, native: {**state, "param_groups": state["param_groups"] * 2},
        ValueError,
        "parameter group",
    ),
}


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
@pytest.mark.parametrize("change, error, message", WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_state_of_another_kind_is_refused(
    change: Callable[..., Any], error: type[Exception], message: str
) -> None:
    model, optimizer, training = adam()
    training.compile(X, Y)
    native = torch.optim.Adam(model.parameters(), lr=0.5).state_dict()

    with pytest.raises(error, match=message) as refused:
        optimizer.load_state_dict(change(optimizer.state_dict(), native))

    assert "Only IPU" not in message or isinstance(refused.value, poptorch.Error)
    assert not optimizer.ipu_state_is_dirty


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
def test_a_state_without_an_ipu_state_loads_the_numbers_of_its_groups() -> None:
    model, optimizer, _ = adam()
    native = torch.optim.Adam(model.parameters(), lr=0.5).state_dict()

    optimizer.load_state_dict({"ipu_state": None, "ipu_param": None, **native})

    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.ipu_state_is_dirty


@pytest.mark.spec("executor", 31, 32)
@pytest.mark.spec("optimizers", 14, 16)
def test_a_part_of_a_state_is_loaded_when_the_model_is_compiled_and_the_rest_stays() -> None:
    _, donor, training = adam()
    training.compile(X, Y)
    state = donor.state_dict()
    _, optimizer, training = adam()

    optimizer.load_state_dict({**state, "ipu_state": {WEIGHT: state["ipu_state"][WEIGHT] + 0.5}})
    training.compile(X, Y)

    assert (state_of(optimizer)[WEIGHT] == 0.5).all()
    assert state_of(optimizer).keys() == state["ipu_state"].keys()


@pytest.mark.spec("executor", 60)
@pytest.mark.spec("optimizers", 15, 17)
def test_states_are_read_once_and_partial_ones_merge_when_they_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, optimizer, training = adam()
    training(X, Y)
    assert optimizer.get_state_dict()["ipu_state"] is None
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        before = optimizer.state_dict()
        optimizer.state_dict()
    assert caplog.text.count("Writing optimiser state tensors from IPU to host") == 1
    part, stranger = {WEIGHT: torch.full((2, 4), 7.0)}, {"Accl1___other": torch.ones(7), "x": None}
    optimizer.load_state_dict({**before, "ipu_state": {**part, **stranger}})
    assert set(state_of(optimizer)) == {*part, *stranger}
    optimizer.param_groups[0]["lr"] = 0.0
    training.setOptimizer(optimizer)  # no weight moves: only the state is of interest
    training(X, Y)
    merged = state_of(optimizer)
    assert "does not contain Accl2___layer.weight, Step___layer.weight, " in caplog.text
    assert set(merged) == set(before["ipu_state"])
    assert (merged[WEIGHT] > 5).all()
    assert (merged["Accl1___layer.bias"].abs() < 5).all()


@pytest.mark.spec("executor", 29, 34, 54, 69)
@pytest.mark.spec("optimizers", 1, 2)
@pytest.mark.spec("programs", 19)
@pytest.mark.parametrize("kind", [poptorch.optim.SGD, torch.optim.SGD])
def test_a_changed_rate_waits_for_set_optimizer(kind: type) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    training = wrapped(model, optimizer)

    def step(rate: float) -> None:
        eager_model = copy.deepcopy(model)
        eager_model(X, Y).backward()
        training(X, Y)
        expected = eager_model.layer.weight.detach() - rate * eager_model.layer.weight.grad
        torch.testing.assert_close(model.layer.weight.detach(), expected)

    optimizer.param_groups[0]["lr"] = 0.0  # after wrapping: not seen
    step(0.1)
    training.setOptimizer(optimizer)
    step(0.0)
    optimizer.param_groups[0]["lr"] = 0.1
    training.setOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(0.1)
    scheduler.step()  # no warning about a step of the optimizer: the device made it
    step(0.1)
    training.setOptimizer(optimizer)
    step(0.05)


@pytest.mark.spec("executor", 33)
@pytest.mark.spec("optimizers", 29, 30)
def test_a_replaced_optimizer_keeps_its_last_state() -> None:
    model = Net()
    training = wrapped(model)  # optimizers may be made afterwards
    first, second = (
        poptorch.optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=1.0)
        for p in (model.parameters(), [*model.parameters()][::-1])
    )
    training.setOptimizer(first)
    training(X, Y)
    training.setOptimizer(second)
    kept = state_of(first)[WEIGHT].clone()
    assert kept.any()
    assert not state_of(second)[WEIGHT].any()
    training(X, Y)
    assert torch.equal(state_of(first)[WEIGHT], kept)
    other = copy.copy(first)
    other.loss_scaling, other.param_groups[0]["lr"] = 8.0, 0.0
    weight = model.layer.weight.clone()
    training.setOptimizer(other)  # comes with its state
    assert torch.equal(state_of(other)[WEIGHT], kept)
    training(X, Y)
    assert torch.equal(model.layer.weight, weight)
    assert other.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 8


@pytest.mark.spec("optimizers", 4, 22)
def test_one_update_of_the_default_per_device_iteration() -> None:
    training = poptorch.trainingModel(Scaled(lambda x: x), options(iterations=3, accumulation=2))
    weight = 2.0
    training(torch.ones(6))
    for _ in range(3):
        weight -= 0.01 * 2 * weight
    assert training.model.weight.item() == pytest.approx(weight)
    executor = poptorch.inferenceModel(Net(), options())
    with pytest.raises(AssertionError, match="wrapped for training"):
        executor.setOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.spec("optimizers", 23)
@pytest.mark.parametrize("way", ["frozen", "left out"])
def test_parameters_that_are_not_trained_stay(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    trained = [("bias", model.layer.bias)] if way == "left out" else [*model.named_parameters()]
    other = [("scale", torch.nn.Parameter(torch.ones(3)))]
    training = wrapped(model, torch.optim.SGD(trained + other, lr=0.1))
    if way == "frozen":
        model.layer.weight.requires_grad_(False)  # after wrapping
    eager_model = copy.deepcopy(model)
    eager_model(X, Y).backward()
    training(X, Y)
    assert torch.equal(model.layer.weight, eager_model.layer.weight)
    torch.testing.assert_close(
        model.layer.bias, eager_model.layer.bias - 0.1 * eager_model.layer.bias.grad
    )
    (message,) = (text for text in caplog.messages if "do not belong" in text)
    assert f"1 of the optimizer's {len(trained) + 1} parameters" in message
    assert "'scale', shape (3,)" in message


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_model_is_refused(library: Any) -> None:
    training = wrapped(Net(), library.SGD(Net().parameters(), lr=0.1))
    message = r"(?s)None of the optimizer's parameters.*number 0 of group 0, shape \(2, 4\)"
    with pytest.raises(poptorch.Error, match=message):
        training(X, Y)


GIVEN, EXPECTED = normal(8, 4), normal(8, 2, seed=1)
Maker = Callable[[Any], torch.optim.Optimizer]


def net(dropout: float = 0.0) -> nn.Module:
    """Layers with a buffer that counts and a dropout that can be switched on."""
    layers = nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(dropout)
    return Graded(body=nn.Sequential(*layers), head=nn.Linear(6, 2))


def trained(make: Maker) -> EagerPair:
    return EagerPair(net(), make, **near(8 + FUNCTION, 6))


def change(pair: EagerPair, **numbers: Any) -> None:
    for optimizer in pair.both:
        optimizer.param_groups[0].update(numbers)
    pair.wrapped.setOptimizer(pair.ours)


def load(pair: EagerPair, state: dict[str, Any]) -> None:
    for optimizer in pair.both:
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
}


@pytest.mark.slow
@pytest.mark.spec("optimizers", 5, 18)
@pytest.mark.parametrize("name", MAKERS)
def test_state_equals_that_of_eager_and_a_resumed_run_continues_with_it(name: str) -> None:
    first, second = trained(MAKERS[name]), trained(MAKERS[name])
    first.step(GIVEN, EXPECTED, count=3)
    first.compare()
    theirs, ours = (optimizer.state_dict() for optimizer in first.both)
    assert ours["param_groups"] == theirs["param_groups"]
    for at, entry in theirs["state"].items():
        assert {k for k, v in entry.items() if v is not None} == ours["state"][at].keys()
    first.wrapped.detachFromDevice()
    first.compare()
    first.wrapped.destroy()
    first.ours.zero_grad()
    first.model(GIVEN, EXPECTED).backward()
    first.ours.step()  # by hand, with what the device left
    first.eager_step(GIVEN, EXPECTED)
    first.compare()
    checkpoint = copy.deepcopy((first.model.state_dict(), first.ours.state_dict()))
    second.eager, second.theirs = first.eager, first.theirs
    checkpoint[1]["param_groups"][0]["lr"] = first.theirs.param_groups[0]["lr"] = 0.02
    if name in ("Adam", "SGD"):  # there is a program, and other state on the device
        for _ in range(2):
            second.wrapped(GIVEN, EXPECTED)
    if name == "SGD":
        second.wrapped.detachFromDevice()
    second.model.load_state_dict(checkpoint[0])
    second.ours.load_state_dict(checkpoint[1])
    if name == "Adam":
        second.wrapped.copyWeightsToDevice()
    second.step(GIVEN, EXPECTED, count=3)
    second.compare()


def test_the_state_itself_can_be_read_copied_cleared_and_changed() -> None:
    pair = trained(MAKERS["Adam"])
    pair.step(GIVEN, EXPECTED, count=2)
    weight = pair.model.head.weight
    assert len(pair.ours.state) == 6
    assert weight in pair.ours.state
    theirs = pair.theirs.state[pair.eager.head.weight]["exp_avg"]
    torch.testing.assert_close(pair.ours.state[weight]["exp_avg"], theirs)
    pair.step(GIVEN, EXPECTED)
    torch.testing.assert_close(pair.ours.state[weight]["exp_avg"], theirs)
    for copied in (copy.copy(pair.ours.state), pickle.loads(pickle.dumps(pair.ours)).state):
        assert type(copied).__name__ == "defaultdict"
        assert len(copied) == 6
    for optimizer in pair.both:
        optimizer.state.clear()
    pair.step(GIVEN, EXPECTED, count=2)
    pair.compare()
    load(pair, trained(MAKERS["Adam"]).theirs.state_dict())  # of before any step
    pair.step(GIVEN, EXPECTED, count=2)
    pair.compare()
    pair.step(GIVEN, EXPECTED, count=3)
    for edit in (
        lambda state: state["exp_avg"].zero_(),
        lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"])),
        lambda state: state["step"].fill_(0.0),
    ):
        for attached in (True, False):
            if not attached:
                pair.wrapped.detachFromDevice()
            for optimizer in pair.both:
                for entry in optimizer.state.values():
                    edit(entry)
            pair.step(GIVEN, EXPECTED, count=2)
            pair.compare()


def test_a_step_on_the_host_takes_effect_and_a_change_of_old_state_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = trained(MAKERS["Adam"])
    pair.step(GIVEN, EXPECTED)
    pair.ours.zero_grad()  # a step by hand moves weights and moments on the host; both go up
    pair.model.forward(GIVEN, EXPECTED).backward()
    pair.ours.step()
    pair.wrapped.copyWeightsToDevice()
    pair.eager_step(GIVEN, EXPECTED)
    pair.step(GIVEN, EXPECTED)
    old = [entry["exp_avg"] for entry in pair.ours.state.values()]
    pair.step(GIVEN, EXPECTED)
    assert not caplog.records
    for tensor in old:
        tensor.zero_()
    pair.step(GIVEN, EXPECTED, count=2)  # eager's were not changed
    assert caplog.text.count("The device does not receive these changes") == 1
    pair.compare()


SCHEDULES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]]] = {
    "OneCycle": ("Adam", lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9)),
    "OneCycle to zero": (
        "SGD",
        lambda o: lr_scheduler.OneCycleLR(o, 0.05, 9, base_momentum=0.0, max_momentum=0.9),
    ),
    "Plateau": ("AdamW", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_give_eagers_numbers_step_by_step(schedule: str) -> None:
    name, make = SCHEDULES[schedule]
    pair = trained(MAKERS[name])
    schedules = [make(optimizer) for optimizer in pair.both]
    pair.wrapped.setOptimizer(pair.ours)
    with compilations() as programs:
        for _ in range(8):
            pair.step(GIVEN, EXPECTED)
            for scheduler in schedules:
                scheduler.step(*((1.0,) if schedule == "Plateau" else ()))
            pair.wrapped.setOptimizer(pair.ours)
    pair.compare()
    assert len(programs) == 1


# What is changed before each of some pairs of steps, and how many programs that takes.
CHANGES: list[tuple[Maker, str, list[dict[str, Any]], int]] = [
    (
        MAKERS["plain"],
        "attached",
        [
            {"weight_decay": 0.1},
            {"momentum": 0.9},
            {"momentum": 0.5, "weight_decay": 0.0},
            {"dampening": 0.5},
            {"momentum": 0.0},
            {"momentum": 0.9, "dampening": 0.0},
            {"nesterov": True},
            {"nesterov": False},
        ],
        8,
    ),
    (
        lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5),
        "other mode",
        [{"momentum": 0.9}, {"dampening": 0.25}],
        2,
    ),
    (MAKERS["Adam"], "detached", [{"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-4}], 2),
    (MAKERS["RMSprop"], "attached", [{"momentum": 0.0}, {"momentum": 0.5}], 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("make, way, changes, number", CHANGES)
@pytest.mark.spec("executor", 61)
def test_a_term_that_was_compiled_out_comes_in_with_all_state_kept(
    make: Callable[..., Any],
    way: str,
    changes: list[dict[str, float | tuple[float, float]]],
    number: int,
) -> None:
    pair = trained(make)
    with compilations() as programs:
        pair.step(GIVEN, EXPECTED, count=2)
        for numbers in changes:
            if way == "detached":
                pair.wrapped.detachFromDevice()
            change(pair, **numbers)
            if way == "other mode":
                pair.train(not pair.model.training)
            pair.step(GIVEN, EXPECTED, count=2)
            pair.compare()
    if way != "other mode":
        assert len(programs) == number


@pytest.mark.slow
def test_a_message_says_that_loaded_state_changes_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``load_state_dict`` brings numbers along, and with them, a term that was compiled out."""
    donor, pair = (trained(MAKERS["SGD"]), trained(MAKERS["plain"]))
    donor.step(GIVEN, EXPECTED, count=2)
    pair.step(GIVEN, EXPECTED)
    load(pair, donor.ours.state_dict())
    with compilations() as programs, caplog.at_level("INFO", "poptorch::python"):
        pair.step(GIVEN, EXPECTED, count=2)
    assert caplog.text.count("The structure of the optimizer changed") == 1
    pair.compare()
    assert len(programs) == 1


@pytest.mark.parametrize("numbers", [{"lr": 0.01}, {"dampening": 0.5, "weight_decay": 0.1}])
def test_a_new_optimizer_continues_with_the_moments(numbers: dict[str, float]) -> None:
    """The first one, if it comes back, brings its own and shows what the device has then."""
    pair = trained(MAKERS["SGD"])
    pair.step(GIVEN, EXPECTED, count=2)
    first, then = pair.ours, copy.deepcopy(pair.ours.state_dict())
    settings = {"lr": 0.05, "momentum": 0.9, **numbers}
    pair.ours = torch.optim.SGD(pair.model.parameters(), **settings)
    pair.wrapped.setOptimizer(pair.ours)
    pair.theirs.param_groups[0].update(numbers)
    pair.step(GIVEN, EXPECTED, count=3)
    pair.compare()
    pair.ours = first
    pair.wrapped.setOptimizer(first)
    pair.theirs.load_state_dict(then)
    pair.step(GIVEN, EXPECTED)
    pair.compare()


def test_several_optimizers_have_separate_numbers_and_state() -> None:
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
        wrapped(GIVEN, EXPECTED)
        models[1](GIVEN, EXPECTED).backward()
        for optimizer in of_both[1]:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state_dict(), models[1].state_dict())
    for mine, theirs in zip(*of_both, strict=True):
        there = theirs.state_dict()["state"]
        torch.testing.assert_close(mine.state_dict()["state"], there, **near(8 + FUNCTION, 6))


@pytest.mark.parametrize(
    "make, got",
    [
        (lambda a, b: [], "none"),
        (lambda a, b: [torch.optim.Adam(a), torch.optim.AdamW(b)], "Adam, AdamW"),
        (lambda a, b: [poptorch.optim.SGD(p, lr=0.1) for p in (a, b)], "SGD of poptorch"),
        (lambda a, b: [torch.optim.Adam(a), torch.optim.Adam(a + b)], "4 parameters"),
    ],
)
def test_optimizers_that_do_not_go_together_are_refused(make: Callable[..., Any], got: str) -> None:
    model = net()
    parts = [[*part.parameters()] for part in (model.body, model.head)]
    with pytest.raises(poptorch.Error, match=got):
        poptorch.trainingModel(model, options(), make(*parts))


@pytest.mark.slow
def test_the_random_sequence_continues() -> None:
    losses = []
    for changed in (False, True):
        torch.manual_seed(0)
        pair = EagerPair(
            net(dropout=0.5), lambda p: torch.optim.SGD(p, 0.0), options().randomSeed(3)
        )
        pair.wrapped(GIVEN, EXPECTED)
        change(pair, **({"momentum": 0.9} if changed else {}))
        losses.append([pair.wrapped(GIVEN, EXPECTED).item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_a_structural_change_waits_for_set_optimizer_or_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = trained(MAKERS["plain"])
    with compilations() as programs:
        pair.step(GIVEN, EXPECTED)
        pair.ours.param_groups[0]["momentum"] = 0.9
        pair.step(GIVEN, EXPECTED)  # eager's was not changed
    assert "momentum of the optimizer's group 0 was 0 and is 0.9" in caplog.text
    assert len(programs) == 1
    pair = trained(MAKERS["SGD"])
    pair.step(GIVEN, EXPECTED)
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        change(pair, momentum=0.0, nesterov=True)
    change(pair, momentum=0.9, nesterov=False)
    pair.step(GIVEN, EXPECTED)
    pair.compare()


def test_a_beta_of_1_that_is_set_during_training_is_refused_and_training_continues() -> None:
    """Torch's kernel would divide by zero."""
    pair = trained(MAKERS["Adam"])
    pair.step(GIVEN, EXPECTED)

    with pytest.raises(ValueError, match="at least 0 and less than 1"):
        change(pair, betas=(1.0, 0.9))
    change(pair, betas=(0.8, 0.9))

    pair.step(GIVEN, EXPECTED)
    pair.compare()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_double_precision_is_that_of_numbers_and_moments_too(name: str) -> None:
    opts, running = options(accumulation=3), poptorch.MeanReductionStrategy.Running
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
    opts.Precision.narrow64Bit(False)
    pair = EagerPair(
        net().double(), MAKERS[name], opts, **near(8 + FUNCTION, 6, dtype=torch.float64)
    )
    whole = GIVEN.double(), EXPECTED.double()
    for _ in range(3):
        got = pair.wrapped(*(x.repeat(3, 1) for x in whole))
        torch.testing.assert_close(got, pair.eager_step(*whole), **pair.close)
