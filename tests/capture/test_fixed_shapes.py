"""Functions whose shapes depend on their arguments: where these are constants all is torch's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

import poptorch
from helpers.cases import together
from helpers.wrapping import Having, inference, trains_alike

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
