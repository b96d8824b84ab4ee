"""A warning names changes of an optimizer that would change the compiled update."""

import functools
import re
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as of_torch

import poptorch
from helpers.closeness import near
from helpers.wrapping import PAUSE, EagerPair, Regression, normal, options
from poptorch._session.host_changes import periodic_checks

X, Y = normal(4, 4), normal(4, 2, seed=1)
NOT_FOLLOWED = "The compiled program does not follow what changed on the host: "
Change = Callable[[torch.optim.Optimizer], object]
sgd = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def checks_are_never_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_checks, "CHEAP", 60.0)


@pytest.fixture
def in_effect_for_all() -> Iterator[list]:
    """Handles of hooks of all optimizers, which go after the test."""
    handles: list = []
    yield handles
    for handle in handles:
        handle.remove()


def run(executor: poptorch.PoplarExecutor, calls: int = 1) -> None:
    """Call it so that what changed is looked at."""
    for _ in range(calls):
        time.sleep(PAUSE)
        executor(X, Y)


def trained(make: Callable) -> tuple[torch.optim.Optimizer, poptorch.PoplarExecutor]:
    model = Regression()
    optimizer = make(model.parameters())
    executor = poptorch.trainingModel(model, options(), optimizer)
    run(executor)
    return optimizer, executor


def messages_about_changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if NOT_FOLLOWED in text]


def entry(**numbers: object) -> Change:
    return lambda optimizer: optimizer.param_groups[0].update(numbers)


def attribute(**values: object) -> Change:
    return lambda optimizer: [setattr(optimizer, *each) for each in values.items()]


def without_bias(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def with_other_list(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][:1]


def with_bias_apart(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})


def bound_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)


def before_each_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def after_each_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


class OneNumber(torch.optim.Optimizer):
    """Descends with a rate, which is the only entry of its groups besides the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * weight.grad


def test_a_change_of_the_only_number_of_an_optimizer_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, executor = trained(functools.partial(OneNumber, lr=0.1))

    optimizer.param_groups[0]["lr"] = 0.5
    run(executor)

    (message,) = messages_about_changes(caplog)
    assert "lr of the optimizer's group 0 was 0.1 and is 0.5" in message


class Schedule:
    def __init__(self) -> None:
        self.rate = 0.1

    def __call__(self) -> float:
        return self.rate


def schedule_of_list() -> Callable[[], float]:
    rates = [0.1]
    return lambda: rates[0]


class Scheduled(torch.optim.Optimizer):
    """Descends with a rate that a function computes from a value of the group."""

    def __init__(self, params: Any, schedule: Any, rate: Callable[[Any], float]) -> None:
        super().__init__(params, {"schedule": schedule})
        self.rate = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= self.rate(group["schedule"]) * weight.grad


# what makes the value, what computes the rate from it, and what changes its contents
SCHEDULES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]] = {
    "a field": (Schedule, lambda s: s.rate, lambda s: setattr(s, "rate", 0.5)),
    "a field of an object that is called": (
        Schedule,
        lambda s: s(),
        lambda s: setattr(s, "rate", 0.5),
    ),
    "a field of an object in a list": (
        lambda: [Schedule()],
        lambda s: s[0].rate,
        lambda s: setattr(s[0], "rate", 0.5),
    ),
    "what a function closes over": (
        schedule_of_list,
        lambda s: s(),
        lambda s: s.__closure__[0].cell_contents.__setitem__(0, 0.5),
    ),
    "the length of a list": (lambda: [1], lambda s: 0.1 * len(s), lambda s: s.append(1)),
    "the entries of an empty list": (list, lambda s: 0.1 + 0.1 * len(s), lambda s: s.append("a")),
    "the keys of a dictionary": (
        lambda: {"a": 0.1},
        lambda s: sum(s.values()),
        lambda s: s.update(b=0.4),
    ),
    "a set": (lambda: {0.1}, max, lambda s: s.add(0.5)),
}


@pytest.mark.parametrize(("make", "rate", "change"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_changed_value_of_a_group_takes_effect_with_set_optimizer(
    make: Callable[[], Any], rate: Callable[[Any], float], change: Callable[[Any], object]
) -> None:
    def scheduled(params: Any) -> torch.optim.Optimizer:
        return Scheduled(params, make(), rate)

    pair = EagerPair(Regression(), scheduled, **near(8, 3))
    pair.step(X, Y)
    for optimizer in pair.both:
        change(optimizer.param_groups[0]["schedule"])
    pair.wrapped.setOptimizer(pair.ours)

    pair.step(X, Y, count=2)


@pytest.mark.parametrize(("make", "rate", "change"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_changed_value_of_a_group_is_reported_without_set_optimizer(
    make: Callable[[], Any],
    rate: Callable[[Any], float],
    change: Callable[[Any], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, executor = trained(lambda params: Scheduled(params, make(), rate))

    change(optimizer.param_groups[0]["schedule"])
    run(executor)

    (message,) = messages_about_changes(caplog)
    assert "schedule of the optimizer's group 0 was" in message


def test_an_object_in_a_group_that_has_not_changed_needs_no_new_program() -> None:
    optimizer, executor = trained(lambda params: Scheduled(params, Schedule(), Schedule.__call__))
    compiled = executor._executable

    executor.setOptimizer(optimizer)
    run(executor)

    assert executor._executable is compiled


class WithSchedule(OneNumber):
    """Descends with a rate of an object that the optimizer has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.schedule = Schedule()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for weight in self.param_groups[0]["params"]:
            weight -= self.schedule.rate * weight.grad


def test_a_changed_field_of_an_attribute_of_the_optimizer_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, executor = trained(WithSchedule)

    optimizer.schedule.rate = 0.5
    run(executor)

    (message,) = messages_about_changes(caplog)
    assert "schedule of the optimizer was Schedule(rate=0.1) and is Schedule(rate=0.5)" in message


OURS = functools.partial(poptorch.optim.SGD, lr=0.1)
OUR_ADAM = functools.partial(poptorch.optim.AdamW, lr=0.1)
CHANGES = {
    "maximize": (sgd, entry(maximize=True), "maximize of the optimizer's group 0 was False and is"),
    "a term": (sgd, entry(weight_decay=0.1), "weight_decay of the optimizer's group 0 was 0 and"),
    "a rate that is a tensor": (
        sgd,
        entry(lr=torch.tensor(0.5)),
        "lr of the optimizer's group 0 was 0.1 and is 0.5",
    ),
    "a rate that was one": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.25)),
        lambda o: o.param_groups[0]["lr"].fill_(0.5),
        "lr of the optimizer's group 0 was 0.25 and is 0.5",
    ),
    "a limit": (sgd, attribute(max_grad_norm=1.0), "max_grad_norm of the optimizer is 1.0"),
    "our limit": (OURS, attribute(max_grad_norm=1.0), "max_grad_norm of the optimizer was inf and"),
    "scaling": (sgd, attribute(loss_scaling=8.0), "loss_scaling of the optimizer is 8.0"),
    "our scaling": (OURS, attribute(loss_scaling=8.0), "loss_scaling of the optimizer was 1.0 and"),
    "correction": (
        OUR_ADAM,
        attribute(bias_correction=False),
        "bias_correction of the optimizer was True",
    ),
    "a type": (
        OURS,
        attribute(accum_type=torch.float16),
        "accum_type of the optimizer was torch.float32",
    ),
    "what may change": (
        OURS,
        lambda o: o.variable_attrs.markAsVariable("momentum"),
        "variable_attrs of the opt",
    ),
    "another algorithm": (
        torch.optim.Adam,
        entry(decoupled_weight_decay=True),
        "decoupled_weight_decay of the opti",
    ),
    "what is refused": (torch.optim.Adam, entry(amsgrad=True), "amsgrad of the optimizer's group"),
    "fewer parameters": (sgd, without_bias, "group 0 of the optimizer lost 1 and gained"),
    "another list of them": (sgd, with_other_list, "group 0 of the optimizer lost 1 and gained"),
    "another group": (sgd, with_bias_apart, "the optimizer's parameter groups was 1 and is 2"),
    "a hook before": (sgd, before_each_step, "1 hook of the optimizer's step"),
    "a hook after": (sgd, after_each_step, "1 hook of the optimizer's step"),
    "another step": (sgd, bound_step, r"step\(\) of SGD"),
}


@pytest.mark.parametrize(("make", "change", "pattern"), CHANGES.values(), ids=CHANGES)
def test_one_warning_names_a_change_of_the_update(
    make: Callable[..., Any] | type, change: Change, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, executor = trained(make)
    caplog.clear()
    change(optimizer)
    run(executor, 3)
    (message,) = messages_about_changes(caplog)
    assert re.search(pattern, message)


def test_a_warning_names_hooks_of_all_optimizers(
    caplog: pytest.LogCaptureFixture, in_effect_for_all: list[Any]
) -> None:
    _, executor = trained(sgd)
    in_effect_for_all += [
        of_torch.register_optimizer_step_pre_hook(lambda *_: None),
        of_torch.register_optimizer_step_post_hook(lambda *_: None),
    ]
    run(executor, 2)
    (message,) = messages_about_changes(caplog)
    assert "2 hooks of the optimizer's step" in message


def test_a_warning_names_a_step_that_its_class_gets_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, executor = trained(sgd)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    run(executor, 2)
    (message,) = messages_about_changes(caplog)
    assert "step() of SGD" in message


def test_each_kind_of_change_causes_its_own_warning(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, executor = trained(sgd)
    for change in (entry(lr=0.5), attribute(max_grad_norm=1.0), without_bias, after_each_step):
        change(optimizer)
        run(executor)
    assert len(messages_about_changes(caplog)) == 4


HARMLESS = {
    "another implementation": entry(foreach=True),
    "an equal number": entry(lr=0.1 + 0.0),
    "an entry of the user's": entry(layer="head", scale=2.0),
    "an attribute of the user's": attribute(steps_done=3, history=[1.0]),
    "an infinite limit": attribute(max_grad_norm=float("inf")),
    "a scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9),
    "another order": lambda optimizer: optimizer.param_groups.reverse(),
    "a hook on loading": lambda optimizer: optimizer.register_load_state_dict_pre_hook(print),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_changes_that_do_not_affect_the_update_cause_no_warning(
    change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, executor = trained(sgd)
    change(optimizer)
    run(executor, 2)
    assert messages_about_changes(caplog) == []


REMEDIES = {
    "maximize": (entry(maximize=True), False),
    "a term": (entry(momentum=0.9, nesterov=True), False),
    "fewer parameters": (without_bias, True),
    "another list of them": (with_other_list, True),
    "another group": (with_bias_apart, True),
}


@pytest.mark.parametrize(("change", "destroys"), REMEDIES.values(), ids=REMEDIES)
def test_a_reported_change_takes_effect_as_the_message_says(
    change: Change, destroys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    models = EagerPair(Regression(), sgd)
    models.step(X, Y)
    for optimizer in models.both:
        change(optimizer)
    if destroys:
        models.wrapped.destroy()
    models.wrapped.setOptimizer(models.ours)
    time.sleep(PAUSE)
    models.step(X, Y, count=3)
    models.compare()
    assert messages_about_changes(caplog) == []


def test_changes_that_need_another_set_optimizer_are_reported_after_the_first_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, executor = trained(sgd)
    after_each_step(optimizer)
    executor.setOptimizer(optimizer)
    run(executor, 2)
    (message,) = messages_about_changes(caplog)
    assert "1 hook of the optimizer's step" in message


WRAPPED_WITH = {
    "a step": (bound_step, r"the replacement does not run \(.*lambda"),
}


@pytest.mark.parametrize(("bring", "pattern"), WRAPPED_WITH.values(), ids=WRAPPED_WITH)
def test_a_warning_names_code_of_an_optimizer_that_does_not_run(
    bring: Callable[..., Any], pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        bring(optimizer)
        return optimizer

    _, executor = trained(make)
    run(executor)
    (message,) = caplog.messages
    assert re.search(pattern, message)


def test_a_scheduler_does_not_hide_another_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 9)
        return optimizer

    trained(make)
    assert caplog.messages == []


def test_changes_of_each_of_several_optimizers_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Regression()
    pair = [sgd([parameter]) for parameter in model.parameters()]
    executor = poptorch.trainingModel(model, options(), pair)
    run(executor)
    entry(maximize=True)(pair[1])
    after_each_step(pair[1])
    run(executor)
    (message,) = messages_about_changes(caplog)
    assert "maximize of the optimizer's group 1 was False and is True" in message
    assert "1 hook of the optimizer's step" in message
