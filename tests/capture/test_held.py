"""Weights that forward reaches through lists, dicts and closures are those of the module."""

import pytest
import torch

import poptorch
from helpers.wrapping import Having, agrees, normal, training, trains_alike

X, Y = normal(8, 4), normal(8, 3, seed=1)


def net(reach: str) -> Having:
    """Return a model; ``reach`` says how forward comes by weight, bias and count of a layer."""

    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias, total = ways[reach](m)
        out = torch.cat([x @ weight.t()[:, :2] + bias[:2], x @ weight[2:].t() + bias.data[2:]], 1)
        total += out.detach().sum(0)
        return out, torch.nn.functional.mse_loss(out, y)

    torch.manual_seed(4)
    layer, total = torch.nn.Linear(4, 3), torch.zeros(3)
    weight, bias = layer.weight, layer.bias
    ways = {
        "attributes": lambda m: (m.layer.weight, m.layer.bias, m.total),
        "closure": lambda m: (weight, bias, total),
        "list": lambda m: (m.listed[0], *m.listed[1]),
        "dict": lambda m: (m.named["weight"], *m.named["rest"].values()),
    }
    named = {"weight": weight, "rest": {"bias": bias, "total": total}}
    return Having(forward, layer=layer, total=total, listed=[weight, (bias, total)], named=named)


@pytest.mark.spec("supported_ops", 28)
@pytest.mark.parametrize("reach", ["closure", "list", "dict"])
def test_they_are_trained_wherever_forward_finds_them(reach: str) -> None:
    model = net(reach)
    trains_alike(model, X, Y, eager=net("attributes"), accumulation=4)
    agrees(model, X, Y)  # a second wrapper shares the parameters


def test_a_view_that_was_made_before_is_refused() -> None:
    def viewing(model, x, y):
        out = x @ model.turned[0] + model.layer.bias
        return out, torch.nn.functional.mse_loss(out, y)

    layer = torch.nn.Linear(4, 3)
    model = Having(viewing, layer=layer, turned=[layer.weight.detach().t()])
    with pytest.raises(poptorch.Error, match=r"(?s)a view of a weight .*'layer\.weight'"):
        training(model)(X, Y)
    agrees(model, X, Y)
