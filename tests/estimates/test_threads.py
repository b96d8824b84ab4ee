"""An estimate in one thread while another one captures: torch's tracer serves one at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from helpers.patience import HANGS
from helpers.wrapped import options
from poptorch import trainingModel


class Net(nn.Module):
    inside = most = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Net.inside += 1
        Net.most = max(Net.most, Net.inside)
        time.sleep(0.01)  # others may come now
        Net.inside -= 1
        return nn.functional.mse_loss(self.layer(x), y)


@pytest.mark.slow
def test_estimates_and_first_calls_wait_for_one_another() -> None:
    ready = threading.Barrier(2)

    def work(estimates: bool) -> None:
        ready.wait(HANGS)
        for _ in range(4):
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            training = trainingModel(model, options(), optimizer)
            if estimates:
                training.estimate(torch.ones(2, 4), torch.ones(2, 3))
            else:
                assert training(torch.ones(2, 4), torch.ones(2, 3)).isfinite()
            training.destroy()

    with ThreadPoolExecutor(2) as pool:
        for thread in [pool.submit(work, estimates) for estimates in (True, False)]:
            thread.result(HANGS)
    assert Net.most == 1
