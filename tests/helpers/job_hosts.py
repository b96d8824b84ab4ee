"""``poprun`` on the first host that it is told, and the program that it starts on both."""

from __future__ import annotations

import sys

import torch
from torch import nn

import popdist.poptorch
import poptorch
from helpers import namespaces
from poptorch import _job
from poptorch._cli import poprun


def main(*arguments: str) -> int:
    """Run a job from the second host; return its status."""
    namespaces.enter([*namespaces.HOSTS][-1])
    return poprun.main([*arguments, sys.executable, "-m", "helpers.job_hosts"])


def train() -> None:
    """Be one process of the job; print the weights."""
    options = popdist.poptorch.Options().backend("reference").showCompilationProgressBar(False)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss()
    )
    x = torch.arange(12.0).view(4, 3) / 10 + options.Distributed.processId
    for _ in range(3):
        training(x, x.sum(1))
    print("weights", model[0].weight.tolist(), flush=True)
    print("address", _job.own_address(), flush=True)


if __name__ == "__main__":
    train()
