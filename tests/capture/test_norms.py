"""Batch norms: statistics evolve as in torch's own modules, whatever the momentum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import options, training


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        out = self.norm(x * self.weight)
        return out, poptorch.identity_loss((out + x).square().sum(), "none")


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("norm, shape", [
    (nn.BatchNorm1d(3, momentum=None), (4, 3)),
    (nn.BatchNorm2d(3, momentum=None, affine=False), (4, 3, 2, 2)),
    (nn.BatchNorm3d(3, momentum=None), (4, 3, 2, 2, 2)),
])  # fmt: skip
def test_without_momentum_every_batch_has_the_same_share(norm, shape, accumulation) -> None:
    model, eager = Normed(copy.deepcopy(norm)), Normed(copy.deepcopy(norm))
    executor = training(model, options(accumulation=accumulation), lr=0.01)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    for call in range(3):
        x = normal(accumulation * shape[0], *shape[1:], seed=call)
        out, _ = executor(x)
        optimizer.zero_grad()
        for part in x.split(shape[0]):
            expected, loss = eager(part)
            (loss / accumulation).backward()
        optimizer.step()
        torch.testing.assert_close(out[-shape[0] :], expected.detach())
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert eager.norm.num_batches_tracked == 3 * accumulation
    assert "forward" not in vars(model.norm)


def test_in_evaluation_the_averages_are_used() -> None:
    model = Normed(nn.BatchNorm1d(3, momentum=None))
    x = normal(4, 3)
    model(x)
    model.eval()
    expected, _ = model(x)
    got, _ = poptorch.inferenceModel(model, options())(x)
    torch.testing.assert_close(got, expected.detach())
