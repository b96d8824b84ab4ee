"""Measure the peak memory of a process in a job of two, with whole and divided optimizer state.

Usage: python benchmarks/process_memory.py [--width N] [--processes N] [--backend NAME]

Adam trains three square matrices, by default with 50 million weights. If two processes divide the
state, each should need half of Adam's bytes less. Other load on the machine does not matter.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import torch
from torch import nn

import poptorch


class Net(nn.Module):
    """Three large matrices, one after another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, self.loss(out, y)


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def train(width: int, backend: str, in_parts: bool) -> None:
    """Run one process of the job: train a few steps and print the peak."""
    torch.set_num_threads(1)
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(in_parts)
    options.TensorLocations.setOptimizerLocation(settings)
    net = Net(width)
    training = poptorch.trainingModel(net, options, poptorch.optim.Adam(net.parameters()))
    for _ in range(3):
        training(torch.randn(4, width), torch.randn(4, width))
    if options.Distributed.processId == 0:
        print(peak())


def job(chosen: argparse.Namespace, in_parts: bool) -> int:
    """Run a job to its end. Return the peak of its first process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables = {**os.environ, "WORLD_SIZE": str(chosen.processes), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *sys.argv, *(["--in-parts"] if in_parts else [])]
    processes = [
        subprocess.Popen(command, env={**variables, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(chosen.processes)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a process has failed")
    return int(printed[0])


def main() -> None:
    """Start both jobs, or run one process of a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--width", type=int, default=4096, help="rows and columns of each matrix (default: 4096)"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "--backend", default="optimise", help="backend that runs the programs (default: optimise)"
    )
    parser.add_argument("--in-parts", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        train(chosen.width, chosen.backend, chosen.in_parts)
        return
    adam = 2 * 4 * 3 * chosen.width**2
    job(chosen, False)  # which compiles
    job(chosen, True)
    whole, parts = job(chosen, False), job(chosen, True)
    print(
        f"{chosen.processes} processes, Adam's state {adam >> 20} MiB: a process has at most "
        f"{whole >> 20} MiB with all of it, {parts >> 20} MiB with a part: "
        f"{(whole - parts) / adam:4.2f} of the state less"
    )


if __name__ == "__main__":
    main()
