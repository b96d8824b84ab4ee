"""A job whose script exchanges numbers of its own while the program does."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import poptorch
from helpers.wrapped import options


def main(folder: str) -> None:
    """Train in two processes; the one begins to add up before a call, the other does it after."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opts = options()
    opts.Distributed.configureProcessId(index, count)
    training = poptorch.trainingModel(
        model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss()
    )
    x, y = torch.randn(2, 4), torch.randn(2, 1)
    training(x, y)  # the processes meet
    mine = torch.full((5,), float(index + 1))  # as many elements as there are gradients
    work = dist.all_reduce(mine, async_op=True) if index == 0 else None
    training(x, y)
    work = work or dist.all_reduce(mine, async_op=True)
    work.wait()
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    results = {"mine": mine, "weights": model.state_dict(), "limit": limit.total_seconds()}
    torch.save(results, Path(folder) / f"{index}.pt")
