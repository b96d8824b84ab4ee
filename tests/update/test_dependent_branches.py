"""Branches of a step about one weight that decide what happens to others."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

LIMIT = 0.3
Update = Callable[[Sequence[nn.Parameter]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x))), y)


class Stepping(torch.optim.Optimizer):
    """An optimizer whose step is a function of all weights."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, {"lr": 0.1})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._update([p for group in self.param_groups for p in group["params"]])


def descend(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.sub_(0.1 * weight.grad)


def unless_the_first_is_steep(weights: Sequence[nn.Parameter]) -> None:
    if weights[0].grad.norm() > LIMIT:
        return
    descend(weights)


def if_all_are_flat(weights: Sequence[nn.Parameter]) -> None:
    if all(weight.grad.norm() < LIMIT for weight in weights):
        descend(weights)


def until_one_is_steep(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        if weight.grad.norm() > LIMIT:
            break
        descend([weight])


def those_that_are_flat(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        if weight.grad.norm() < LIMIT:
            descend([weight])


@pytest.mark.parametrize(
    "update", [unless_the_first_is_steep, if_all_are_flat, until_one_is_steep, those_that_are_flat]
)
def test_weights_are_those_of_eager_torch(update: Update) -> None:
    print(inspect.getsource(update))  # for whoever reads a failure
    torch.manual_seed(0)
    model = Net()
    eager_model = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = Stepping(eager_model.parameters(), update)
    training = poptorch.trainingModel(model, options(), Stepping(model.parameters(), update))
    for size in (0.1, 0.5, 1.0, 3.0):
        x, y = torch.randn(5, 4), size * torch.randn(5, 2)
        training(x, y)
        optimizer.zero_grad()
        eager_model(x, y).backward()
        optimizer.step()

    torch.testing.assert_close(model.state_dict(), eager_model.state_dict())
    assert not torch.equal(model.first.weight, before["first.weight"])


def test_a_tensor_of_two_groups_that_a_step_changes_is_refused() -> None:
    model = Net()
    groups = [{"params": [*layer.parameters()]} for layer in (model.first, model.last)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"].mul_(0.5)

    optimizer.register_step_post_hook(halve)
    training = poptorch.trainingModel(model, options(), optimizer)

    with pytest.raises(
        poptorch.Error, match="'lr' of parameter group 0, and also 'lr' of parameter group 1"
    ):
        training(torch.randn(5, 4), torch.randn(5, 2))


def test_a_tensor_of_a_group_that_is_also_an_attribute_is_refused_if_a_step_changes_it() -> None:
    class Decaying(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": torch.tensor(0.1)})
            self.rate = self.param_groups[0]["lr"]

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for weight in self.param_groups[0]["params"]:
                weight.sub_(self.param_groups[0]["lr"] * weight.grad)
            self.rate.mul_(0.9)

    model = Net()
    training = poptorch.trainingModel(model, options(), Decaying(model.parameters()))

    with pytest.raises(
        poptorch.Error, match="'rate' of the optimizer, and also 'lr' of parameter group 0"
    ):
        training(torch.randn(5, 4), torch.randn(5, 2))


def test_a_pair_of_numbers_that_a_hook_replaces_comes_back_as_a_pair() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())

    def decay(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0] * 0.5, group["betas"][1])

    optimizer.register_step_post_hook(decay)
    training = poptorch.trainingModel(model, options(), optimizer)
    for _ in range(2):
        training(torch.randn(5, 4), torch.randn(5, 2))

    betas = optimizer.state_dict()["param_groups"][0]["betas"]

    assert betas == pytest.approx((0.225, 0.999))


def test_an_attribute_of_several_elements_that_a_step_uses_is_refused_by_name() -> None:
    class Weighting(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.factors = torch.tensor([1.0, 0.5])

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for weight in self.param_groups[0]["params"]:
                weight.grad.mul_(self.factors[0])
            super().step()

    model = Net()
    training = poptorch.trainingModel(model, options(), Weighting(model.parameters()))

    with pytest.raises(poptorch.Error, match=r"factors, of shape \(2,\)"):
        training(torch.randn(5, 4), torch.randn(5, 2))
