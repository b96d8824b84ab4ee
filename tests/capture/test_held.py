"""Weights that forward reaches through lists, dicts and closures are those of the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options, trained_plainly
from poptorch import Error

X, Y = normal(8, 4), normal(8, 3, seed=1)


class Net(nn.Module):
    """Whose ``reach`` says how forward comes by the weight, bias and count of a layer."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(3))
        weight, bias, total = self.layer.weight, self.layer.bias, self.total
        self.ways: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
            "attributes": lambda: (self.layer.weight, self.layer.bias, self.total),
            "closure": lambda: (weight, bias, total),
        }
        self.listed = [weight, (bias, total)]
        self.named = {"weight": weight, "rest": {"bias": bias, "total": total}}
        self.ways["list"] = lambda: (self.listed[0], *self.listed[1])
        self.ways["dict"] = lambda: (self.named["weight"], *self.named["rest"].values())
        self.reach = reach

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias, total = self.ways[self.reach]()
        out = torch.cat([x @ weight.t()[:, :2] + bias[:2], x @ weight[2:].t() + bias.data[2:]], 1)
        total += out.detach().sum(0)
        return out, nn.functional.mse_loss(out, y)


def trained(reach: str, accumulation: int) -> dict[str, torch.Tensor]:
    model, opts = Net(reach), options()
    opts.Training.gradientAccumulation(accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, opts, optimizer)
    for _ in range(3):
        training(X, Y)
    inference = poptorch.inferenceModel(model, options())
    torch.testing.assert_close(inference(X, Y)[0], model(X, Y)[0])
    training.copyWeightsToHost()
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("reach", ["closure", "list", "dict"])
def test_they_are_trained_wherever_forward_finds_them(reach: str, accumulation: int) -> None:
    ours = trained(reach, accumulation)
    for name, expected in trained_plainly(Net("attributes"), X, Y, accumulation).items():
        torch.testing.assert_close(ours[name], expected, msg=name)


def test_a_buffer_in_a_list_counts() -> None:
    model = Net("list")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    out = sum(training(X, Y)[0].sum(0) for _ in range(2))
    torch.testing.assert_close(model.total, out)


def test_a_view_that_was_made_before_is_refused() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.turned = self.layer.weight.detach().t()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = x @ self.turned + self.layer.bias
            return out, nn.functional.mse_loss(out, y)

    model = Viewing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Error, match="a view of a weight that was made outside") as caught:
        poptorch.trainingModel(model, options(), optimizer)(X, Y)
    assert "'layer.weight'" in str(caught.value)
    out, loss = poptorch.inferenceModel(model, options())(X, Y)
    torch.testing.assert_close((out, loss), model(X, Y))
