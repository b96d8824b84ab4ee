"""Operators of other libraries that write to what they are given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, infer, normal, options, runs_compiled, training, trains_alike

X = normal(4, 3)


@torch.library.custom_op("poptorch_tests::advance", mutates_args={"x"})
def advance(x: torch.Tensor, by: float = 1.0) -> None:
    x.add_(by)


@torch.library.custom_op("poptorch_tests::pop", mutates_args={"x"})
def pop(x: torch.Tensor, shift: list[int]) -> torch.Tensor:
    x.add_(1)
    return x * shift[0]


pop.register_fake(lambda x, shift: torch.empty_like(x))
LIBRARY = torch.library.Library("poptorch_tests", "FRAGMENT")
LIBRARY.define("grow_(Tensor(a!) x, *, float by=2.0) -> Tensor(a!)")
LIBRARY.define("grow_all(Tensor(a!)[] xs) -> ()")
LIBRARY.impl("grow_", lambda x, by=2.0: x.mul_(by), "CompositeExplicitAutograd")
LIBRARY.impl("grow_all", lambda xs: None, "CompositeExplicitAutograd")


def counting(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    advance(model.count, by=2.0)
    out = model.layer(x) * model.count
    return out, poptorch.identity_loss(out.square(), "mean")


def popping(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.layer(x) * pop(model.count, [3]) + model.count
    return out, poptorch.identity_loss(out.square(), "mean")


def growing(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        model.count.add_(1)
        grown = torch.ops.poptorch_tests.grow_(model.count[:2], by=1.5)
    out = model.layer(x) * model.count + grown.sum()
    return out, poptorch.identity_loss(out.square(), "mean")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("function", [counting, popping, growing])
def test_values_that_an_operator_writes_to_a_buffer_are_kept(
    function: Callable[..., Any], accumulation: int
) -> None:
    torch.manual_seed(0)
    model = Having(function, layer=nn.Linear(3, 3), count=torch.zeros(3))

    trains_alike(model, X, accumulation=accumulation)


def test_views_show_values_that_an_operator_writes_to_a_computed_tensor() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        view = doubled.t()
        advance(doubled)
        return view

    got = infer(forward, X)

    torch.testing.assert_close(got, (X * 2 + 1).t())


@pytest.mark.larger("test_values_that_an_operator_writes_to_a_buffer_are_kept")
def test_an_operator_that_writes_runs_in_compiled_code() -> None:
    torch.manual_seed(0)
    model = Having(counting, layer=nn.Linear(3, 3), count=torch.zeros(3))
    executor = training(model, options("inductor"))
    executor.compile(X)

    executor(X)

    assert runs_compiled(executor)
    assert torch.equal(model.count, torch.full((3,), 2.0))


def test_an_operator_that_writes_to_a_list_of_tensors_is_refused_by_its_name() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.poptorch_tests.grow_all([y])
        return y

    with pytest.raises(poptorch.Error, match="in a way that cannot be compiled") as refused:
        infer(forward, X)

    assert "poptorch_tests::grow_all" in refused.value.message
    assert "test_pure_forms.py" in refused.value.message
