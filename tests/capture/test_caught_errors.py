"""Errors of operators that ``forward`` catches."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options, trains_alike

Function = Callable[[torch.Tensor], torch.Tensor]


def added_in_place(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y += torch.ones(4, 4, 4)
    return y


FAILING: dict[str, Function] = {
    "a product": lambda y: y @ torch.ones(5, 2),
    "a sum": lambda y: y + torch.ones(7),
    "a view": lambda y: y.view(5, 5),
    "tensors that cannot be joined": lambda y: torch.cat([y, torch.ones(9, 9)]),
    "an operator in place": added_in_place,
    "an inverse": lambda y: torch.linalg.inv(y[:1]),
    "an index": lambda y: y[7],
    "a function of several operators": lambda y: nn.functional.cosine_similarity(y, y[:, :3]),
}


@pytest.mark.parametrize("function", FAILING.values(), ids=FAILING)
def test_forward_goes_on_after_an_error_that_it_catches(function: Function) -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x)
        try:
            y = function(y)
        except (RuntimeError, IndexError):
            y = y * 3
        return nn.functional.mse_loss(y, torch.ones_like(y))

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(4, 3), accumulation=2)


class Compared(nn.Module):
    """Compares complex numbers, for which there is no kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.to(torch.complex64) > 1
        except RuntimeError:
            return x > 1


def test_an_error_that_only_a_run_raises_names_the_operator_and_the_line() -> None:
    with pytest.raises(poptorch.Error, match=r"aten\.gt\.Scalar") as raised:
        poptorch.inferenceModel(Compared(), options())(normal(2, 3))

    assert "return x.to(torch.complex64) > 1" in str(raised.value)
