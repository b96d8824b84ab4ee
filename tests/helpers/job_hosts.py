"""``poprun`` on one of two hosts, and a process of the job that it starts on both."""

from pathlib import Path

import torch

import popdist.poptorch
import poptorch
from hosts import ADDRESSES, INTERFACE, Wire, enter
from poptorch import _job
from poptorch._cli import poprun


def reached(folder: Path, wire: Wire) -> tuple[list[str], dict[str, str]]:
    """Return the command that ``main`` runs on the second host, and its environment variables."""
    first, second = wire.hosts
    shell = folder / "shell"
    shell.write_text(f'#!/bin/sh\nexec ip netns exec {first} sh -c "$2"\n')
    shell.chmod(0o755)
    variables = {"POPTORCH_REMOTE_SHELL": str(shell), "GLOO_SOCKET_IFNAME": INTERFACE}
    return [second, f"--host={','.join(reversed(ADDRESSES))}"], variables


def main(host: str, *arguments: str) -> int:
    """Run a job from a host; return its status."""
    enter(host)
    return poprun.main(["--oversubscribe", *arguments])


def train() -> None:
    """Be one process of the job; print the weights."""
    options = popdist.poptorch.Options().backend("reference").showCompilationProgressBar(False)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss()
    )
    x = torch.arange(12.0).view(4, 3) / 10 + options.Distributed.processId
    for _ in range(3):
        training(x, x.sum(1))
    print("weights", model[0].weight.tolist(), flush=True)
    print("address", _job.own_address(), flush=True)


if __name__ == "__main__":
    train()
