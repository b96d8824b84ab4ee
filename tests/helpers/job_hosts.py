"""Two hosts, which are network namespaces, ``poprun`` on one, and what it starts on both."""

import contextlib
import ctypes
import os
import subprocess
import sys

import torch

import popdist.poptorch
import poptorch
from poptorch import _job
from poptorch._cli import poprun

INTERFACE = "poptorch0"
HOSTS = {"poptorch-a": "10.213.7.1", "poptorch-b": "10.213.7.2"}
_NETWORK = 0x40000000  # CLONE_NEWNET


class UnavailableError(Exception):
    """Namespaces cannot be made here."""


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        raise UnavailableError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts():
    """Within the block there are HOSTS, each with its address at INTERFACE, or UnavailableError."""
    made = []
    try:
        for name in HOSTS:
            _ip("netns", "add", name)
            made.append(name)
        first, second = HOSTS
        _ip("-n", first, "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", second)  # fmt: skip
        for name, address in HOSTS.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in made:
            _ip("netns", "del", name)


def enter(name: str) -> None:
    """Put this process, and those it starts, on a host."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


def main(*arguments: str) -> int:
    """Run a job from the second host; return its status."""
    enter([*HOSTS][-1])
    return poprun.main([*arguments, sys.executable, "-m", "helpers.job_hosts"])


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
