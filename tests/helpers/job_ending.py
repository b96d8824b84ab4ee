"""A script as users write it, that trains as a process of a job and closes nothing itself.

``python -m helpers.job_ending HOW [FILE]``: "ends", "raises" or "exits with 3"; it waits for FILE.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import popdist.poptorch
import poptorch
from helpers.patience import eventually
from poptorch._job import heartbeat


class Slow:
    """An object that takes a while to delete when Python ends, while other threads can run."""

    def __del__(self, pause: Callable[..., Any] = time.sleep) -> None:  # type: ignore[no-untyped-def]
        pause(0.3)


slow = Slow()


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return poptorch.identity_loss(super().forward(x).square(), "mean")


def main(how: str, file: str = "") -> None:
    heartbeat.INTERVAL = 0.0  # the thread is within torch's store nearly always
    torch.manual_seed(0)
    options = popdist.poptorch.Options().backend("reference").showCompilationProgressBar(False)
    model = Net(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    for _ in range(2):
        loss = training(torch.ones(2, 4))
    torch.distributed.all_reduce(loss)
    print(f"trained, {loss.item():.3f}", flush=True)
    if file:
        assert eventually(Path(file).exists)
    if how == "raises":
        raise ValueError("no more data")
    if how == "exits with 3":
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
