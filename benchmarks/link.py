"""Two processes over a slow link: with the backward pass cut in two, without, and torch's DDP.

Usage: python benchmarks/link.py [NAME ...] [--rate 1gbit] [--rounds N] [--backend NAME]

The processes are in two network namespaces, which needs root, ``ip`` and ``tc``; ``--rate none``
has them on one machine, where the library itself does not cut.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist

import poptorch
from poptorch import _job
from processes import ddp, reductions, turns, wrapped
from workloads import WORKLOADS, Workload

NAMES = ("bert", "mlp")
PORT = "29511"
HOSTS = {"poptorch-l0": "10.213.8.1", "poptorch-l1": "10.213.8.2"}
INTERFACE = "poptorch1"


@contextlib.contextmanager
def linked(rate: str) -> Iterator[None]:
    """Within the block HOSTS are joined by a link that lets so much through in each direction."""
    first, second = HOSTS
    commands = [f"ip netns add {name}" for name in HOSTS]
    commands += [
        f"ip -n {first} link add {INTERFACE} type veth peer name {INTERFACE} netns {second}"
    ]
    for name, address in HOSTS.items():
        commands += [
            f"ip -n {name} addr add {address}/24 dev {INTERFACE}",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set {INTERFACE} up",
            f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 50ms",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False)


def compiled(work: Workload, backend: str, apart: bool) -> poptorch.PoplarExecutor:
    """Return the wrapped model, compiled for machines of their own or for one."""
    address = f"machine {dist.get_rank()}" if apart else "one machine"
    with patch.object(_job, "own_address", lambda: address):
        model = wrapped(work, True, backend)
        model(*work.batch())
    return model


def measure(name: str, backend: str, rounds: int) -> None:
    """Print one row."""
    work = WORKLOADS[name]
    cut, whole = compiled(work, backend, True), compiled(work, backend, False)
    batch, begin = work.batch(), reductions(whole)[1]
    took = turns(
        {
            "cut": lambda: cut(*batch), "whole": lambda: whole(*batch), "ddp": ddp(work),
            "plain": lambda: begin().wait(),
        },
        set(), rounds,
    )  # fmt: skip
    if dist.get_rank() == 0:
        print(
            f"{name:10s} whole {took['whole'] * 1e3:8.2f} ms a call, cut "
            f"{took['cut'] / took['whole']:4.2f} of that, DDP {took['ddp'] / took['cut']:4.2f} of "
            f"the cut's; one all_reduce of its gradients {took['plain'] * 1e3:6.2f} ms",
            flush=True,
        )
    cut.destroy()
    whole.destroy()


def start(rate: str) -> int:
    """Start this program on both hosts, or twice here; return how it ended."""
    places = [["ip", "netns", "exec", name] if rate != "none" else [] for name in HOSTS]
    address = next(iter(HOSTS.values())) if rate != "none" else "127.0.0.1"
    variables = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": PORT}
    interface = INTERFACE if rate != "none" else "lo"
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    with linked(rate) if rate != "none" else contextlib.nullcontext():
        processes = [
            subprocess.Popen(
                [*place, sys.executable, *sys.argv], env={**variables, "RANK": str(rank)}
            )
            for rank, place in enumerate(places)
        ]
        return max(process.wait() for process in processes)


def main() -> int:
    """Start the two processes, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backend", default="optimise")
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        return start(chosen.rate)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in chosen.names:
        measure(name, chosen.backend, chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
