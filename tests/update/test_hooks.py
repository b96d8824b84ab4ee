"""Hooks that are registered before a model is wrapped are part of the optimizer's steps."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_torch

import poptorch
from helpers import traced_optimizers as own
from helpers.cases import every_pair
from helpers.closeness import FUNCTION, near
from helpers.wrapping import options

T = torch.optim
COUNTS = {"iterations": 2, "accumulation": 3, "replicas": 2}
ROWS, CALLS = 24, 3  # rows: of one update
BOUNDS = near(ROWS + 6 * FUNCTION, CALLS * COUNTS["iterations"])
Hook = Callable[..., Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.last(torch.tanh(self.first(x)))
        return scores, nn.functional.cross_entropy(scores, labels)


class Pair:
    """A model that a program trains, and its copy, which eager PyTorch trains."""

    def __init__(self, make: Make, backend: str = "reference") -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.eager_model = copy.deepcopy(self.model)
        self.optimizer, self.eager_optimizer = make(self.model), make(self.eager_model)
        opts = options(backend, **COUNTS)
        self.training = poptorch.trainingModel(self.model, opts, self.optimizer)
        self._generator = torch.Generator().manual_seed(1)

    def train(self, calls: int = CALLS) -> None:
        rows = ROWS * COUNTS["iterations"]
        for _ in range(calls):
            x = torch.randn(rows, 6, generator=self._generator)
            labels = torch.randint(3, (rows,), generator=self._generator)
            self.training(x, labels)
            for batch in zip(x.split(ROWS), labels.split(ROWS), strict=True):
                self.eager_optimizer.zero_grad()
                self.eager_model(*batch)[1].backward()
                self.eager_optimizer.step()

    def assert_alike(self) -> None:
        torch.testing.assert_close(self.model.state_dict(), self.eager_model.state_dict(), **BOUNDS)


def train_like_eager(
    model: nn.Module,
    eager_model: nn.Module,
    make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    steps: int,
) -> None:
    """Train a wrapped model, and its copy in eager PyTorch, with several optimizers each."""
    training = poptorch.trainingModel(model, options(), make(model))
    eager_optimizer = make(eager_model)
    x, labels = torch.randn(8, 6), torch.randint(3, (8,))
    for _ in range(steps):
        training(x, labels)
        eager_model.zero_grad()
        eager_model(x, labels)[1].backward()
        for each in eager_optimizer:
            each.step()


def clip_by_groups(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.1)

    return hook


def clip_by_model(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return hook


def scale_one_gradient(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model.last.weight.grad.mul_(3)

    return hook


def replace_gradients(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in model.parameters():
            p.grad = torch.sign(p.grad)

    return hook


def clamp_weights(model: nn.Module) -> Hook:
    @torch.no_grad()
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            torch._foreach_clamp_min_(group["params"], -0.2)

    return hook


def average_weights(model: nn.Module) -> Hook:
    @torch.no_grad()
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in model.parameters():
            state = optimizer.state[p]
            if "average" not in state:
                state["average"] = p.detach().clone()
            state["average"].lerp_(p, 0.1)

    return hook


def lower_rate(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    return hook


BEFORE = {
    "clip the parameters of groups": clip_by_groups,
    "clip the parameters of the model": clip_by_model,
    "scale one gradient": scale_one_gradient,
    "replace gradients": replace_gradients,
}
AFTER = {
    "clamp weights": clamp_weights,
    "average weights in the state": average_weights,
    "lower the rate": lower_rate,
}
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: T.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: T.AdamW(model.parameters(), lr=0.01),
    "Lion": lambda model: own.Lion(model.parameters(), lr=0.01),
}


def hooked(make: Make, before: Any = None, after: Any = None) -> Make:
    def with_hooks(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        if before is not None:
            optimizer.register_step_pre_hook(before(model))
        if after is not None:
            optimizer.register_step_post_hook(after(model))
        return optimizer

    return with_hooks


@pytest.mark.parametrize("hook, optimizer", every_pair(BEFORE, OPTIMIZERS))
def test_hooks_before_a_step_change_its_inputs_as_in_eager_torch(
    hook: Callable[[nn.Module], Hook], optimizer: Make
) -> None:
    pair = Pair(hooked(optimizer, before=hook))

    pair.train()

    pair.assert_alike()


@pytest.mark.parametrize("hook, optimizer", every_pair(AFTER, OPTIMIZERS))
def test_hooks_after_a_step_change_its_results_as_in_eager_torch(
    hook: Callable[[nn.Module], Hook], optimizer: Make
) -> None:
    pair = Pair(hooked(optimizer, after=hook))

    pair.train()

    pair.assert_alike()


@pytest.mark.larger("test_hooks_before_a_step_change_its_inputs_as_in_eager_torch")
def test_hooks_are_part_of_compiled_steps() -> None:
    pair = Pair(hooked(OPTIMIZERS["SGD"], clip_by_model, clamp_weights), "inductor")

    pair.train()

    pair.assert_alike()


@pytest.fixture
def for_all_optimizers() -> Iterator[list[Any]]:
    """Handles of hooks of all optimizers, which go after the test."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


def test_hooks_of_all_optimizers_are_part_of_the_steps(for_all_optimizers: list[Any]) -> None:
    for_all_optimizers += [
        of_torch.register_optimizer_step_pre_hook(clip_by_groups(nn.Identity())),
        of_torch.register_optimizer_step_post_hook(clamp_weights(nn.Identity())),
    ]
    pair = Pair(OPTIMIZERS["SGD"])

    pair.train()

    pair.assert_alike()


def test_state_that_a_hook_makes_is_in_the_state_of_the_optimizer() -> None:
    pair = Pair(hooked(OPTIMIZERS["SGD"], after=average_weights))

    pair.train()

    got, expected_value = pair.optimizer.state_dict(), pair.eager_optimizer.state_dict()
    torch.testing.assert_close(got["state"], expected_value["state"], **BOUNDS)


def with_whole_numbers(model: nn.Module) -> torch.optim.Optimizer:
    """Copies a learning rate that is an int, and computes with it."""

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["last"] = group["lr"]
            group["twice"] = 2 * group["lr"] + 1
            group["half"] = group["lr"] / 2
            group["counts"]["steps"] += 1

    optimizer = T.SGD(model.parameters(), lr=1)
    optimizer.param_groups[0]["counts"] = {"steps": 0}
    optimizer.register_step_post_hook(note)
    return optimizer


@pytest.mark.parametrize("name", ["last", "twice", "half", "counts"])
def test_numbers_that_a_hook_stores_in_a_group_have_the_values_and_types_of_eager_pytorch(
    name: str,
) -> None:
    pair = Pair(with_whole_numbers)

    pair.train()

    (got,), (want,) = pair.optimizer.param_groups, pair.eager_optimizer.param_groups
    assert repr(got[name]) == repr(want[name])


def test_a_hook_that_adds_a_container_to_a_group_is_refused() -> None:
    def add(model: nn.Module) -> Hook:
        return lambda optimizer, args, kwargs: optimizer.param_groups[0].update(pair=(0.5, 1))

    pair = Pair(hooked(OPTIMIZERS["SGD"], after=add))

    with pytest.raises(poptorch.Error, match="'pair', a tuple that a step or a hook stores"):
        pair.train(1)


def test_arguments_that_a_hook_returns_are_those_of_the_step() -> None:
    class Halving(T.Optimizer):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None, *, halve: Any = False) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] * (0.5 if halve else 1.0))

    def halve(model: nn.Module) -> Any:
        return lambda optimizer, args, kwargs: (args, {**kwargs, "halve": True})

    pair = Pair(hooked(lambda model: Halving(model.parameters(), {"lr": 0.1}), before=halve))

    pair.train()

    pair.assert_alike()


def test_a_hook_that_treats_each_parameter_separately_is_not_run_on_bundles() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ParameterList(nn.Parameter(torch.ones(5)) for _ in range(20))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            for scale in self.more:
                hidden = hidden * scale
            scores = self.last(hidden)
            return scores, nn.functional.cross_entropy(scores, labels)

    def scale_some(model: nn.Module) -> Any:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for number, p in enumerate(model.more):
                p.grad.mul_(1 + number)

        return hook

    torch.manual_seed(0)
    model = Deep()
    eager_model = copy.deepcopy(model)
    make = hooked(lambda each: T.SGD(each.parameters(), lr=0.1), before=scale_some)
    training = poptorch.trainingModel(model, options(), make(model))
    eager_optimizer = make(eager_model)
    x, labels = torch.randn(8, 6), torch.randint(3, (8,))

    for _ in range(2):
        training(x, labels)
        eager_optimizer.zero_grad()
        eager_model(x, labels)[1].backward()
        eager_optimizer.step()

    torch.testing.assert_close(
        model.state_dict(), eager_model.state_dict(), **near(30 * FUNCTION, 2)
    )


def test_a_number_that_a_hook_uses_takes_effect_with_set_optimizer() -> None:
    limit = 0.1

    def clip(model: nn.Module) -> Any:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)

        return hook

    pair = Pair(hooked(OPTIMIZERS["SGD"], before=clip))
    pair.train(1)
    limit = 0.02
    pair.training.setOptimizer(pair.optimizer)

    pair.train(2)

    pair.assert_alike()


# What cannot be part of a step.

_outside: list[Any] = []


def count(model: nn.Module) -> Hook:
    calls = 0

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1

    return hook


def keep_norms(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _outside.append(model.last.weight.grad.norm())

    return hook


def set_attribute(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model.steps = getattr(model, "steps", 0) + 1

    return hook


def print_norm(model: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        print(f"{model.last.weight.grad.norm().item():.2f}")

    return hook


def average_outside(model: nn.Module) -> Hook:
    averages = [p.detach().clone() for p in model.parameters()]

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch._foreach_lerp_(averages, [*model.parameters()], 0.1)

    return hook


REFUSED = {
    "counts": (count, "variable 'calls'"),
    "keeps norms in a list": (keep_norms, "variable '_outside'"),
    "sets an attribute of the model": (set_attribute, "'steps'|variable 'model'"),
    "prints": (print_norm, "prints a tensor"),
    "averages outside of the state": (average_outside, r"a tensor of shape \(5, 6\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_cannot_be_part_of_a_step_is_refused_with_its_line(name: str) -> None:
    hook, pattern = REFUSED[name]
    pair = Pair(hooked(OPTIMIZERS["SGD"], before=hook))

    with pytest.raises(poptorch.Error) as raised:
        pair.train(1)

    assert re.search(pattern, raised.value.message)
    assert re.search(r"Where: +test_hooks\.py:\d+, ", raised.value.message)


@pytest.mark.parametrize("name", ["keeps norms in a list", "counts"])
def test_a_hook_that_was_refused_has_left_nothing(name: str) -> None:
    hook, _ = REFUSED[name]
    pair = Pair(hooked(OPTIMIZERS["SGD"], before=hook))

    with pytest.raises(poptorch.Error):
        pair.train(1)

    assert _outside == []


def test_hooks_of_optimizers_that_have_no_step_in_python_are_refused() -> None:
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip_by_model(model))

    with pytest.raises(poptorch.Error, match=r"1 hook of poptorch\.optim"):
        poptorch.trainingModel(model, options(), optimizer)


def test_an_optimizer_with_other_hooks_makes_another_program() -> None:
    pair = Pair(hooked(OPTIMIZERS["Lion"], before=clip_by_model))
    pair.train(1)
    state = copy.deepcopy(pair.eager_optimizer.state_dict())
    make = hooked(OPTIMIZERS["Lion"], before=scale_one_gradient)
    pair.optimizer, pair.eager_optimizer = make(pair.model), make(pair.eager_model)
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.load_state_dict(copy.deepcopy(state))
    pair.training.setOptimizer(pair.optimizer)

    pair.train(2)

    pair.assert_alike()


# Hooks of state dictionaries run on the host, as in eager PyTorch.


def test_hooks_of_state_dict_run_on_the_state_of_the_device() -> None:
    def first_velocity(optimizer: torch.optim.Optimizer, found: Any) -> Any:
        return {**found, "first": found["state"][0]["momentum_buffer"].clone()}

    pair = Pair(OPTIMIZERS["SGD"])
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.register_state_dict_post_hook(first_velocity)

    pair.train()

    got, expected_value = (
        pair.optimizer.state_dict()["first"],
        pair.eager_optimizer.state_dict()["first"],
    )
    torch.testing.assert_close(got, expected_value, **BOUNDS)


def test_a_hook_before_state_dict_sees_the_state_of_the_device() -> None:
    seen = []

    def look(optimizer: torch.optim.Optimizer) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        seen.append(optimizer.state[weight]["momentum_buffer"].clone())

    pair = Pair(OPTIMIZERS["SGD"])
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.register_state_dict_pre_hook(look)
    pair.train()

    pair.optimizer.state_dict()
    pair.eager_optimizer.state_dict()

    torch.testing.assert_close(*seen, **BOUNDS)


def test_hooks_of_load_state_dict_change_the_state_of_the_program() -> None:
    def halve(optimizer: torch.optim.Optimizer, found: Any) -> Any:
        for entry in found["state"].values():
            entry["momentum_buffer"] = entry["momentum_buffer"] / 2
        return found

    def raise_rate(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.2

    pair = Pair(OPTIMIZERS["SGD"])
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(raise_rate)
    pair.train(1)
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    pair.train(2)

    pair.assert_alike()


@pytest.mark.larger("test_each_of_several_optimizers_looks_at_its_own_weights_only")
def test_each_of_several_optimizers_has_its_own_hooks_and_attributes() -> None:
    torch.manual_seed(0)
    model = Net()
    eager_model = copy.deepcopy(model)

    def both(each: nn.Module) -> list[torch.optim.Optimizer]:
        pair = [
            own.Lookahead(each.first.parameters(), lr=0.1, every=2),
            own.Lookahead(each.last.parameters(), lr=0.1, every=3),
        ]
        pair[1].register_step_pre_hook(clip_by_groups(each))
        return pair

    train_like_eager(model, eager_model, both, steps=6)

    torch.testing.assert_close(
        model.state_dict(), eager_model.state_dict(), **near(30 * FUNCTION, 6)
    )


def test_each_of_several_optimizers_looks_at_its_own_weights_only() -> None:
    torch.manual_seed(0)
    model = Net()
    eager_model = copy.deepcopy(model)

    def both(each: nn.Module) -> list[torch.optim.Optimizer]:
        return [own.OneNorm(each.first.parameters()), own.OneNorm(each.last.parameters())]

    train_like_eager(model, eager_model, both, steps=3)

    torch.testing.assert_close(
        model.state_dict(), eager_model.state_dict(), **near(30 * FUNCTION, 3)
    )
