"""An estimate in one thread while another one captures: torch's tracer serves one at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from helpers.patience import HANGS
from helpers.wrapped import options
from poptorch import trainingModel
from poptorch._capture import trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


@pytest.mark.slow
def test_estimates_and_first_calls_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, ready = trace._quiet, threading.Barrier(2)
    inside, most = [0], [0]

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)  # others may come now
        with quiet():
            yield
        inside[0] -= 1

    monkeypatch.setattr(trace, "_quiet", counting)

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
    assert most[0] == 1
