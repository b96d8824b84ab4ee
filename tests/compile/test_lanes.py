"""Choosing how many micro-batches run side by side."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import poptorch
from helpers.wrapping import options


class Looping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        y = poptorch.for_loop(2, lambda h: self.layer(h), [x])[0]
        return poptorch.identity_loss(y.sum(), reduction="none")


def test_errors_of_one_micro_batch_say_nothing_of_an_attempt_with_several() -> None:
    training = poptorch.trainingModel(Looping(), options(accumulation=2))
    with pytest.raises(poptorch.Error, match="only supported in inference") as raised:
        training(torch.ones(2, 3))
    assert raised.value.__context__ is None


class Checkpointing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x, y):
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        return F.mse_loss(self.second(hidden), y)


def test_what_runs_forward_again_in_the_backward_pass_runs_in_one_micro_batch() -> None:
    model = Checkpointing()
    eager = copy.deepcopy(model)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, options(accumulation=3), optimizer)(x, y)
    eager(x, y).backward()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
