"""Two threads whose models are compiled at once."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch
from torch import nn

import poptorch
from helpers.patience import HANGS
from helpers.wrapping import options


class Net(nn.Module):
    """Many small operators, so that captures take long enough to meet."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, target):
        self.calls.add_(1)
        for _ in range(20):
            x = torch.tanh(self.layer(x))
        return x, nn.functional.mse_loss(x, target)


def steps(model: nn.Module, x, target, ready) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), optimizer)
    ready.wait()
    return [training(x, target)[1] for _ in range(3)]


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_first_calls_at_once_do_not_mix(sizes: tuple[int, int]) -> None:
    torch.manual_seed(1)
    models = [Net(size) for size in sizes]
    natives = [Net(size) for size in sizes]
    for native, model in zip(natives, models, strict=True):
        native.load_state_dict(model.state_dict())
    batches = [(torch.randn(2, size), torch.randn(2, size)) for size in sizes]
    ready = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(steps, model, *batch, ready)
            for model, batch in zip(models, batches, strict=True)
        ]
        losses = [each.result(timeout=HANGS) for each in work]
    for model, native, batch, got in zip(models, natives, batches, losses, strict=True):
        optimizer = torch.optim.SGD(native.parameters(), lr=0.1)
        for loss in got:
            optimizer.zero_grad()
            expected = native(*batch)[1]
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
        for name, tensor in model.state_dict().items():
            assert type(tensor) is torch.Tensor
            torch.testing.assert_close(tensor, native.state_dict()[name])
