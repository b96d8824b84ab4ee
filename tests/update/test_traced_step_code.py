"""Python code of a traced ``step`` means what it means in eager torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.traced_steps import Frozen, Net, Pair, state_of, step_by_function, wrapped
from helpers.wrapping import compilations

T = torch.optim


def every_third(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    if state["count"] % 3 == 0 and p.norm() > 0.5:
        p.mul_(0.9)
    elif p.sum() > 0:
        p.sub_(p.grad, alpha=group["lr"])


def ints_are_no_tensors(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    rate = group["lr"]
    rate *= 2  # not what the other weights use
    rate -= 0.05
    p.sub_(p.grad, alpha=rate)


def with_masks(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    mask = p.grad > 0
    p[mask] = 0.1
    p[~mask] = group["lr"]


def with_bounds(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    p.clamp_(-group["lr"], max(group["lr"], 0.2))
    p.add_(torch.full_like(p, group["lr"]))
    p.addmm_(p.reshape(len(p), -1), torch.ones(1, 1), alpha=group["lr"]) if p.dim() < 0 else None


def with_numbers_that_have_to_be_those_of_python(
    p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> None:
    flat = p.reshape(1, -1), p.grad.reshape(1, -1)
    similar = nn.functional.cosine_similarity(*flat, eps=group["lr"])
    p.sub_(p.grad * similar * group["lr"])


def data_is_replaced(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    p.data = p.data - group["lr"] * p.grad.data


def norms_that_are_kept(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    if not state:
        state["norm"] = 0.0
    state["norm"] = 0.9 * state["norm"] + p.grad.norm().item()
    p.sub_(p.grad, alpha=group["lr"] / (1 + state["norm"]))


def by_shape(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    if p.dim() == 2:
        p.sub_(p.grad.mean(dim=1, keepdim=True), alpha=group["lr"])
    else:
        p.sub_(p.grad.sign(), alpha=group["lr"])


def tensors_of_a_given_type(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    two = torch.tensor(2.7, dtype=torch.int64)
    p.sub_(p.grad * two * group["lr"])


@pytest.mark.parametrize(
    "function",
    [
        every_third,
        ints_are_no_tensors,
        with_masks,
        with_bounds,
        data_is_replaced,
        norms_that_are_kept,
        by_shape,
        with_numbers_that_have_to_be_those_of_python,
        tensors_of_a_given_type,
    ],
)
def test_code_of_a_step_has_the_same_meaning_as_in_eager_torch(function: Any) -> None:
    print(inspect.getsource(function))  # for whoever reads a failure
    pair = Pair(step_by_function(function))
    pair.steps(7)
    pair.assert_alike()


def numbers_of_both_types(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    state["share"] = state.get("share", 1.0) * 0.5
    state["double"], state["half"] = state["count"] * 2, state["count"] / 2
    state["whole half"], state["remaining"] = state["count"] // 2, 9 - state["count"]
    p.sub_(p.grad, alpha=group["lr"] * state["share"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("count", int),
        ("share", float),
        ("double", int),
        ("half", float),
        ("whole half", int),
        ("remaining", int),
    ],
)
def test_a_number_in_the_state_has_the_type_of_eager_torch(name: str, kind: type) -> None:
    pair = Pair(step_by_function(numbers_of_both_types))

    pair.steps(3)

    number = pair.optimizer.state_dict()["state"][0][name]
    assert type(number) is kind


class ClippingByHand(T.Optimizer):
    """Asks whether the norm of all gradients is above a limit, and then for each weight."""

    def __init__(self, params: Any, limit: float = 0.1) -> None:
        super().__init__(params, {"lr": 0.1})
        self.limit = limit

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        total = torch.sqrt(sum(p.grad.pow(2).sum() for p in weights))
        if total > self.limit:
            for p in weights:
                p.grad.mul_(self.limit / total)
        for p in weights:
            if p.norm() > 1:
                p.mul_(0.9)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("limit", [0.01, 0.3, 100.0])
def test_a_branch_may_ask_about_all_weights(limit: float) -> None:
    pair = Pair(lambda model: ClippingByHand(model.parameters(), limit))
    pair.steps(4)
    pair.assert_alike()


class ByParameter(T.Optimizer):
    """Has numbers for parameters, by the parameter itself and by its identity."""

    def __init__(self, model: Net, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.scales = {p: 1.0 + at for at, p in enumerate(model.parameters())}
        self.slow = {id(model.first.bias)}
        self.known = [*model.parameters()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.known:
            scale = self.scales[p] * (0.1 if id(p) in self.slow else 1.0)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * scale)


def test_attributes_may_know_parameters_and_their_identities() -> None:
    pair = Pair(ByParameter)
    pair.steps(3)
    pair.assert_alike()


def test_a_step_may_use_parameters_that_it_reaches_through_the_model() -> None:
    def make(model: Net) -> Any:
        def function(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            scale = 1 + model.first.bias.abs().mean()
            p.sub_(p.grad * scale, alpha=group["lr"])

        return step_by_function(function)(model)

    pair = Pair(make)
    pair.steps(3)
    pair.assert_alike()


class DecayingRate(T.Optimizer):
    """Changes a rate that is a tensor in place."""

    def __init__(self, params: Any, rate: torch.Tensor) -> None:
        super().__init__(params, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)
            group["lr"].mul_(0.9)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_a_step_changes_in_place_is_the_users_tensor(shape: tuple[int, ...]) -> None:
    rates = []

    def make(model: Net) -> Any:
        rates.append(torch.full(shape, 0.1))
        return DecayingRate(model.parameters(), rates[-1])

    pair = Pair(make)
    pair.steps(3)
    pair.assert_alike()
    assert pair.optimizer.param_groups[0]["lr"] is rates[0]
    torch.testing.assert_close(*rates)


def test_a_step_that_leaves_frozen_parameters_alone_is_that_of_eager_torch() -> None:
    pair = Pair(lambda model: T.NAdam(model.parameters(), lr=0.01), kind=Frozen)
    pair.steps(3)
    pair.assert_alike()


class AddingUp(T.Optimizer):
    """Adds up norms in a tensor that is an attribute, in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.total.add_(p.grad.norm())
                p.sub_(p.grad / (1 + self.total), alpha=group["lr"])


def test_a_tensor_of_the_optimizer_that_a_step_changes_in_place_keeps_its_value() -> None:
    pair = Pair(lambda model: AddingUp(model.parameters()))
    pair.steps(3)
    pair.assert_alike()
    torch.testing.assert_close(pair.optimizer.total, pair.eager_optimizer.total)


def test_state_in_a_deque_is_that_of_eager_torch() -> None:
    def mean_of_three(p: Any, group: Any, state: Any) -> None:
        if not state:
            state["last"] = deque([torch.zeros_like(p) for _ in range(3)], maxlen=3)
        state["last"].append(p.grad.clone())
        p.sub_(sum(state["last"]), alpha=group["lr"])

    pair = Pair(step_by_function(mean_of_three))
    pair.steps(5)

    pair.assert_alike()
    got, expected = (state_of(each)["state"][0] for each in (pair.optimizer, pair.eager_optimizer))
    assert got["last"].maxlen == 3
    torch.testing.assert_close([*got["last"]], [*expected["last"]])


def test_arguments_may_be_passed_by_keyword() -> None:
    def by_keyword(p: Any, group: Any, state: Any) -> None:
        if not state:
            state["momentum"] = nn.init.constant_(torch.empty_like(input=p), val=0.01)
            state["step"] = torch.full(size=(), fill_value=0.0)
        state["step"] += 1
        blended = torch.lerp(input=state["momentum"], end=p.grad, weight=0.5)
        state["momentum"].copy_(blended)
        direction = torch.where(condition=blended > 0, input=blended, other=blended * 0.5)
        torch.add(input=p, other=direction, alpha=-group["lr"], out=p)
        p.div_(other=torch.tensor(data=1.01))

    pair = Pair(step_by_function(by_keyword))
    pair.steps(4)

    pair.assert_alike()


class ByName(T.Optimizer):
    """Updates biases twice as fast, which it knows by their names."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (2.0 if "bias" in name else 1.0))


class Deep(Net):
    """Has enough small weights that those with the same update are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.inner:
            x = x + layer(x)
        return super().forward(x, labels)


@pytest.mark.parametrize("kind", [Net, Frozen, Deep])
def test_a_step_may_ask_for_the_names_of_parameters(kind: Any) -> None:
    pair = Pair(lambda model: ByName(model.named_parameters()), kind=kind)
    pair.steps(4)

    pair.assert_alike()


def test_a_number_that_is_computed_from_the_last_weight_is_kept() -> None:
    class Recording(ByName):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.last = 0.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            self.last = self.param_groups[0]["params"][-1].grad.norm().item()

    pair = Pair(lambda model: Recording(model.named_parameters()))
    pair.steps(3)

    pair.assert_alike()
    assert pair.optimizer.last == pytest.approx(pair.eager_optimizer.last)


warned = False


def test_what_only_the_first_step_changes_on_the_host_is_left_to_it() -> None:
    def warning_once(p: Any, group: Any, state: Any) -> None:
        global warned
        warned = True
        p.sub_(p.grad, alpha=group["lr"])

    pair = Pair(step_by_function(warning_once))
    pair.steps(3)

    pair.assert_alike()
    assert warned


def test_a_step_may_call_a_compiled_function() -> None:
    @torch.compile
    def descend(p: torch.Tensor, gradient: torch.Tensor, rate: Any) -> None:
        p.sub_(gradient * rate)

    class Compiled(T.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                descend(p, p.grad, self.param_groups[0]["lr"])

    training = wrapped(model := Net(), Compiled(model.parameters(), {"lr": 0.1}))
    plain = wrapped(other := copy.deepcopy(model), T.SGD(other.parameters(), 0.1))
    batch = torch.ones(24, 6), torch.zeros(24, dtype=torch.int64)
    with torch.compiler.set_stance("force_eager"):  # for the check against eager PyTorch
        training(*batch)
    plain(*batch)

    torch.testing.assert_close(model.state_dict(), other.state_dict())


@dataclasses.dataclass
class Settings:
    factor: float = 1.0


class Configured(T.Optimizer):
    """Multiplies its rate by numbers in containers, objects and private attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.factors = {"all": [1.0, 0.5]}
        self.settings = Settings()
        self._private = 1.0
        self.log: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, second = self.factors["all"]
        factor = first * second * self.settings.factor * self._private * self.defaults["lr"]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=factor)


CHANGES: dict[str, Callable[[Configured], object]] = {
    "an entry of a list": lambda optimizer: optimizer.factors["all"].__setitem__(0, 3.0),
    "a container": lambda optimizer: setattr(optimizer, "factors", {"all": [2.0, 2.0]}),
    "an object": lambda optimizer: setattr(optimizer.settings, "factor", 3.0),
    "a private attribute": lambda optimizer: setattr(optimizer, "_private", 3.0),
    "a default": lambda optimizer: optimizer.defaults.update(lr=0.2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_an_optimizer_holds_and_you_change_is_followed(name: str) -> None:
    pair = Pair(lambda model: Configured(model.parameters()))
    pair.steps(2)

    for optimizer in (pair.optimizer, pair.eager_optimizer):
        CHANGES[name](optimizer)
    pair.training.setOptimizer(pair.optimizer)
    pair.steps(2)

    pair.assert_alike()


def test_a_list_of_an_optimizer_that_grows_causes_no_compilation() -> None:
    pair = Pair(lambda model: Configured(model.parameters()))
    pair.steps(1)

    with compilations() as programs:
        for _ in range(3):
            pair.optimizer.log.append(0.5)
            pair.training.setOptimizer(pair.optimizer)
            pair.steps(1)

    assert not programs
    pair.assert_alike()
