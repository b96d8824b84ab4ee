"""What the page of differences says of bits: equal with SGD, equal to rounding with Adam."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.layers = nn.Sequential(convolution, nn.Linear(4 * 36, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_backend_trains_bit_for_bit_where_the_arithmetic_is_the_same(name) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[name](net.parameters()) for net in (model, eager))
    wrapped = poptorch.trainingModel(model, options(), ours)
    for _ in range(10):
        x, y = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
        loss = wrapped(x, y)
        theirs.zero_grad()
        want = eager(x, y)
        want.backward()
        theirs.step()
        if name == "Adam":
            torch.testing.assert_close(loss, want.detach(), rtol=0, atol=2e-6)
        else:
            assert torch.equal(loss, want.detach())
    if name != "Adam":
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
