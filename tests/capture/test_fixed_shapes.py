"""Functions whose shapes depend on their arguments: where these are constants all is torch's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

import poptorch
from helpers.cases import together
from helpers.wrapping import Having, inference, normal, options, trains_alike

X = torch.arange(120.0).view(5, 6, 4).sin()
COUNTS, LABELS = torch.tensor([2, 0, 1]), torch.tensor([[2, 0, 1], [0, 2, 2]])
PAIRS = torch.arange(30).view(5, 6) % 3 == 0


def padded(
    x: torch.Tensor, lengths: list[int] | torch.Tensor, first: bool, **how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = rnn.pack_padded_sequence(x, lengths, first, enforce_sorted=False)
    result, found = rnn.pad_packed_sequence(packed, first, **how)
    return packed.data, result, result.sum() * found


def filled(x: torch.Tensor, index: Any, value: float = -1.0) -> torch.Tensor:
    x = x * 1
    x[index] = value
    return x


@pytest.mark.slow
@pytest.mark.parametrize("section", ["losses", "sequences", "masks"])
def test_values_and_gradients_are_those_of_torch(section: str) -> None:
    function = together(section, "x, i, l, t, r, p, w", **globals())

    def forward(model: Having, x: torch.Tensor, start: torch.Tensor) -> Any:
        (i,), x = start, x * model.weight
        targets = torch.tensor([[1, 2, 2], [3, 1, 0]]) + 0 * i
        masks = (mask & (i > 0) for mask in (torch.arange(5) % 2 == 0, PAIRS, X > 0.3))
        outs = function(x, i, x[:, :2].log_softmax(-1), targets, *masks)
        differentiable = (out for out in pytree.tree_leaves(outs) if out.requires_grad)
        total = sum(out.float().square().sum() for out in differentiable)
        return outs, poptorch.identity_loss(total, "none")

    model = Having(forward, weight=nn.Parameter(torch.ones(X.shape)))
    trains_alike(model, X, torch.tensor([1]), steps=1, lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["choices", "windows"])
def test_values_are_those_of_torch(section: str) -> None:
    function = together(section, "x, i", **globals())
    model = inference(function)
    for start in torch.tensor([1, 2]):
        torch.testing.assert_close(model(X, start), function(X, start), check_dtype=False)


def with_places(function: Any, *places: int) -> Having:
    """Return a model with places in a buffer, on which the shape of its result depends."""
    model = Having(function)
    model.register_buffer("places", torch.tensor(places))
    return model


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.tensor_split(x, m.places)[1],
        lambda m, x: x.tensor_split(tensor_indices_or_sections=m.places, dim=1)[0],
        lambda m, x: padded(x[:2], m.places, True)[1],
    ],
    ids=["rows", "columns", "lengths"],
)
def test_places_in_a_buffer_decide_a_shape(function: Any) -> None:
    model = with_places(function, 1, 3)

    result = poptorch.inferenceModel(model, options())(X)

    torch.testing.assert_close(result, model(X))


def test_a_change_of_places_that_decide_a_shape_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = with_places(lambda m, x: torch.tensor_split(x, m.places)[1], 1, 3)
    wrapped = poptorch.inferenceModel(model, options())
    wrapped(X)
    model.places += 1

    wrapped.copyWeightsToDevice()
    wrapped(X)

    assert any("the values of 'places', which decide a shape" in text for text in caplog.messages)


def test_places_in_an_input_are_refused_and_the_line_is_named() -> None:
    def split(_: Having, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.tensor_split(x, places)[1]

    with pytest.raises(poptorch.Error, match=r"torch\.tensor_split: the shape") as raised:
        poptorch.inferenceModel(Having(split), options())(X, torch.arange(5))

    assert "return torch.tensor_split(x, places)[1]" in str(raised.value)


@pytest.mark.parametrize(
    "fill",
    [
        lambda y, i, value: y.index_fill(1, i, value),
        lambda y, i, value: torch.index_fill(y, -1, i[0], value),
        lambda y, i, value: (y * 1).index_fill_(0, i, value),
    ],
    ids=["columns", "one column", "in place"],
)
def test_the_value_that_fills_places_is_trained(fill: Any) -> None:
    def loss(model: Having, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = model.linear(x)
        return nn.functional.mse_loss(fill(y, i, y[0, 0]), torch.ones_like(y))

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(4, 3), torch.tensor([2, 1, 0, 0]))
