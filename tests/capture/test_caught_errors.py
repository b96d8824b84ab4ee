"""Errors of operators that ``forward`` catches."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options, trains_alike

Function = Callable[[torch.Tensor], torch.Tensor]
each_backend = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("optimise", marks=pytest.mark.slow)]
)


def added_in_place(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y += torch.ones(4, 4, 4)
    return y


def assigned(y: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y = y * 1
    y[index] = value
    return y


def shifted(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[1:] += y[:-1]
    return y


MASK = torch.tensor([True, False, True])

FAILING: dict[str, Function] = {
    "a product": lambda y: y @ torch.ones(5, 2),
    "a sum": lambda y: y + torch.ones(7),
    "a view": lambda y: y.view(5, 5),
    "tensors that cannot be joined": lambda y: torch.cat([y, torch.ones(9, 9)]),
    "an operator in place": added_in_place,
    "an inverse": lambda y: torch.linalg.inv(y[:1]),
    "an index": lambda y: y[7],
    "an index of the wrong type": lambda y: y[torch.ones(4)],
    "indices of different shapes": lambda y: y[[0, 1], [0, 1, 2]],
    "an index in a list that is out of range": lambda y: y[:, [9]],
    "a constant that is out of range": lambda y: nn.functional.embedding(torch.tensor([9]), y),
    "a row to gather that does not exist": lambda y: y.gather(0, torch.full((4, 4), 9)),
    "a written place of the wrong type": lambda y: assigned(y, torch.ones(4), 1.0),
    "a value of the wrong shape": lambda y: assigned(y, [0, 1], torch.ones(3, 4)),
    "a value for other columns": lambda y: assigned(y, (slice(None), [0, 1]), torch.ones(3)),
    "a mask of the wrong shape": lambda y: assigned(y, MASK, 1.0),
    "a computed mask of the wrong shape": lambda y: assigned(y, y[:3] > 0, 1.0),
    "a value for other elements than a mask selects": lambda y: assigned(
        y[:, :3], (slice(None), MASK), torch.ones(3)
    ),
    "an inverse of a constant": lambda y: y * torch.linalg.inv(torch.zeros(4, 4)),
    "a write that overlaps with what it reads": shifted,
    "a write to elements in the same memory": lambda y: y[:1].expand(4, 4).add_(1),
    "a sum to elements in the same memory": lambda y: (
        y[:1].expand(4, 4).index_add_(0, torch.tensor([0]), torch.ones(1, 4))
    ),
    "a part that is too long": lambda y: y.narrow(0, (y.sum() > 0).long(), 9),
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


def test_index_fill_counts_a_negative_constant_from_the_end() -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x).index_fill(1, torch.tensor([-1, 0]), 0.3)
        return nn.functional.mse_loss(y, torch.ones_like(y))

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(4, 3), accumulation=2)


@each_backend
def test_a_failed_write_at_a_position_changes_nothing(backend: str) -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x) * 1
        position = (x.sum() > 0).long()
        with contextlib.suppress(RuntimeError):
            y[position] = torch.ones(9)
        return nn.functional.mse_loss(y[position] * 2, y[3])

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(4, 3), opts=options(backend))


@each_backend
def test_an_operator_on_lists_writes_the_tensors_before_the_one_that_fails(backend: str) -> None:
    def both(_: Having, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = [x * 1, x * 2, x * 3]
        with contextlib.suppress(RuntimeError):
            torch._foreach_add_(tensors, [torch.ones(3), torch.ones(7), torch.ones(3)], alpha=2)
        return tuple(tensors)

    x = normal(4, 3)

    results = poptorch.inferenceModel(Having(both), options(backend))(x)

    torch.testing.assert_close(results, both(Having(both), x))


def test_an_error_about_a_written_value_has_the_text_of_eager_pytorch_and_the_users_line() -> None:
    def loss(model: Having, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = model.linear(x).reshape(4, 2, 2) * 1
        y[at[0], :, torch.tensor([1, 0, 1])] = y[:3, :, 0]
        return nn.functional.mse_loss(y, torch.ones_like(y))

    model, x, at = Having(loss, linear=nn.Linear(3, 4)), normal(4, 3), torch.tensor([1, 0, 0, 0])
    with pytest.raises(RuntimeError) as eager:
        model(x, at)

    with pytest.raises(RuntimeError) as raised:
        poptorch.trainingModel(model, options())(x, at)

    assert str(raised.value) == str(eager.value)
    assert "torch.tensor([1, 0, 1])] = y[:3, :, 0]" in raised.value.__notes__[0]


def test_a_write_to_elements_in_the_same_memory_that_eager_pytorch_allows_is_refused() -> None:
    def filled(_: Having, x: torch.Tensor) -> torch.Tensor:
        return (x * 1)[:1].expand(4, 3).fill_(2)

    with pytest.raises(poptorch.Error, match="share memory") as raised:
        poptorch.inferenceModel(Having(filled), options())(normal(4, 3))

    assert "expand(4, 3).fill_(2)" in str(raised.value)


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
