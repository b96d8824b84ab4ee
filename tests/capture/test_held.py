"""Weights that forward reaches through lists, dicts and closures are those of the module."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import Having, agrees, training, trains_alike

X, Y = normal(8, 4), normal(8, 3, seed=1)


class Net(nn.Module):
    """Whose ``reach`` says how forward comes by the weight, bias and count of a layer."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(3))
        weight, bias, total = self.layer.weight, self.layer.bias, self.total
        self.listed = [weight, (bias, total)]
        self.named = {"weight": weight, "rest": {"bias": bias, "total": total}}
        self.ways: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
            "attributes": lambda: (self.layer.weight, self.layer.bias, self.total),
            "closure": lambda: (weight, bias, total),
            "list": lambda: (self.listed[0], *self.listed[1]),
            "dict": lambda: (self.named["weight"], *self.named["rest"].values()),
        }
        self.reach = reach

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias, total = self.ways[self.reach]()
        out = torch.cat([x @ weight.t()[:, :2] + bias[:2], x @ weight[2:].t() + bias.data[2:]], 1)
        total += out.detach().sum(0)
        return out, nn.functional.mse_loss(out, y)


@pytest.mark.spec("supported_ops", 28)
@pytest.mark.parametrize("reach", ["closure", "list", "dict"])
def test_they_are_trained_wherever_forward_finds_them(reach: str) -> None:
    model = Net(reach)
    trains_alike(model, X, Y, eager=Net("attributes"), accumulation=4)
    agrees(model, X, Y)  # a second wrapper shares the parameters


def test_a_view_that_was_made_before_is_refused() -> None:
    def viewing(model, x, y):
        out = x @ model.turned[0] + model.layer.bias
        return out, nn.functional.mse_loss(out, y)

    layer = nn.Linear(4, 3)
    model = Having(viewing, layer=layer, turned=[layer.weight.detach().t()])
    with pytest.raises(poptorch.Error, match="a view of a weight that was made outside") as caught:
        training(model)(X, Y)
    assert "'layer.weight'" in str(caught.value)
    agrees(model, X, Y)
