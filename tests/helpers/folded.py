"""A model that compiled inference folds and packs, a look at what it computes, and packing without
limits of size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import options
from poptorch._cpu import convolutions, packing, product_libraries

LONGEST_SUM = 5 * 9 * 8 + FUNCTION  # of sums one after another


class Mixed(nn.Module):
    """Norms behind convolutions and a product, one before them; scales, sums, activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm2d(3)
        self.convolutions = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1, bias=n > 3) for n in (3, 8))
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)])
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.linear, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6)
        for norm in (self.first, *self.norms, self.last):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = F.relu(self.norms[0](self.convolutions[0](self.first(x))))
        x = F.relu(self.norms[1](self.convolutions[1](inner) * self.scale) + inner)
        y = self.last(self.linear(x.mean((2, 3))))
        bare = F.conv2d(inner, self.convolutions[1].weight)
        return y, F.gelu(y @ torch.sigmoid(self.linear.weight)), torch.tanh(self.scale), bare


def compiled(model: nn.Module, backend: str = "inductor", programs: int = 1) -> Any:
    """Wrap a model for inference on a backend that compiles in this process."""
    return poptorch.inferenceModel(model, options(backend).programs(programs))


def same(executor: poptorch.PoplarExecutor, model: Callable[..., Any], x: torch.Tensor) -> None:
    """Check that a wrapped model computes what the model does in eager PyTorch."""
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(executor(x), expected, **near(LONGEST_SUM, size=4))


def check_new_weights(executor: poptorch.PoplarExecutor, model: nn.Module, x: torch.Tensor) -> None:
    """Give an executor new weights in every way, and check what it computes with them."""
    before = executor(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    torch.testing.assert_close(executor(x), before, rtol=0, atol=0)
    executor.copyWeightsToDevice()
    same(executor, model, x)
    executor.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
    same(executor, model, x)
    executor(x)[2].zero_()  # a result is the caller's
    same(executor, model, x)


def forward_graph(executor: poptorch.PoplarExecutor) -> str:
    """Return the text of the graph that runs in each call."""
    return executor.plan().describe().partition("graph forward")[2]


def pack_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute all products, including those with small weights, and take no convolution
    for small.
    """

    def onednn(
        work: Iterable[product_libraries.Shape], measures: bool
    ) -> dict[product_libraries.Shape, str]:
        return dict.fromkeys(work, product_libraries.ONEDNN)

    monkeypatch.setattr(packing, "_SMALLEST_WEIGHT", 0)
    monkeypatch.setattr(product_libraries, "chosen", onednn)
    monkeypatch.setattr(convolutions, "SMALLEST", 0)
