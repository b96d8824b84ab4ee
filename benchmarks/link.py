"""Train in two processes over a slow link, and compare with torch's DDP.

The benchmark measures the backward pass cut in two parts and whole, and shows which of both the
library chooses from its own measurement of the link. With ``--curve N`` it measures N processes
over links with three latencies: the time of a call, and the prediction.

Usage: python benchmarks/link.py [NAME ...] [--rate 1gbit] [--rounds N] [--backend NAME]
       python benchmarks/link.py [NAME ...] --delayed [--rate 200] [--rounds N] [--backend NAME]
       python benchmarks/link.py --curve N [--parts] [--rate 200] [--rounds N]

The processes are in network namespaces, which needs root, ``ip`` and ``tc``. ``--rate none`` runs
both on this machine without namespaces. With ``--delayed`` and ``--curve``, the rate is in Mbit/s
and packets pass through this program, 1 ms one way, because not every kernel can delay them. The
models of the curve compute little: on few cores the processes alternate, so the computing time of
one process is measured while all compute.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import math
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

import poptorch
from poptorch import _job
from poptorch._place import early
from processes import ddp, reductions, turns, wrapped
from workloads import WORKLOADS, Workload

NAMES = ("bert", "mlp")
PORT = "29511"
HOSTS = {"poptorch-l0": "10.213.8.1", "poptorch-l1": "10.213.8.2"}
INTERFACE = "poptorch1"


@contextlib.contextmanager
def linked(rate: str) -> Iterator[None]:
    """Connect HOSTS, within the block, by a link with this rate in each direction."""
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


LATENCIES = (0.001, 0.005, 0.02)  # seconds, one way
WIDTHS = (128, 512)  # of four layers: 0.25 MiB of gradients, and 4
TUNNEL, FORWARDER = "poptorch2", "LINK_FORWARDER"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000


@contextlib.contextmanager
def tunnelled(count: int) -> Iterator[dict[str, int]]:
    """Create ``count`` namespaces within the block, and yield the tunnel of each address.

    Packets are large, so that forwarding them costs little. Congestion control is the simple
    algorithm, because others measure the link and slow down for a while after a change.
    """
    names, files = [f"poptorch-c{at}" for at in range(count)], {}
    try:
        for at, name in enumerate(names, 1):
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(
                file, TUNSETIFF, struct.pack("16sH22x", TUNNEL.encode(), IFF_TUN | IFF_NO_PI)
            )
            files[f"10.213.9.{at}"] = file
            for command in (
                f"netns add {name}", f"link set {TUNNEL} netns {name}",
                f"-n {name} addr add 10.213.9.{at}/24 dev {TUNNEL}",
                f"-n {name} link set lo up", f"-n {name} link set {TUNNEL} mtu 9000 up",
                f"netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control=reno",
            ):  # fmt: skip
                subprocess.run(["ip", *command.split()], check=True)
        yield files
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def forward(files: Mapping[str, int], rate: float) -> None:
    """Forward packets after a latency and never return. A signal selects the next of LATENCIES."""
    os.sched_setscheduler(
        0, os.SCHED_FIFO, os.sched_param(1)
    )  # otherwise the computing processes delay them
    to = {bytes(map(int, address.split("."))): file for address, file in files.items()}
    free, under_way = dict.fromkeys(files.values(), 0.0), list[tuple[float, int, int, bytes]]()
    latencies, number = iter(LATENCIES), itertools.count()
    latency = 0.0

    def change(*_: object) -> None:
        nonlocal latency
        latency = next(latencies)

    signal.signal(signal.SIGUSR1, change)
    while True:
        while under_way and under_way[0][0] <= time.perf_counter():
            _, _, file, packet = heapq.heappop(under_way)
            os.write(file, packet)
        wait = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else 1.0
        for file in select.select(list(free), [], [], wait)[0]:
            packet = os.read(file, 1 << 16)
            if packet[16:20] in to:
                free[file] = max(time.perf_counter(), free[file]) + len(packet) / rate
                due = free[file] + latency, next(number), to[packet[16:20]], packet
                heapq.heappush(under_way, due)


def start_curve(count: int, rate: float) -> int:
    """Start this program in ``count`` namespaces, and return how it ended."""
    with tunnelled(count) as files:
        forwarder = os.fork()
        if not forwarder:
            forward(files, rate)
        variables = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": next(iter(files))}
        variables |= {"MASTER_PORT": PORT, "OMP_NUM_THREADS": "1", FORWARDER: str(forwarder)}
        variables |= {"GLOO_SOCKET_IFNAME": TUNNEL}
        processes = list[subprocess.Popen[bytes]]()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what follows is done, too
        try:
            for rank in range(count):
                command = ["ip", "netns", "exec", f"poptorch-c{rank}", sys.executable, *sys.argv]
                own = {**variables, "RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own))
            return max(process.wait() for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            os.kill(forwarder, signal.SIGKILL)
            os.waitpid(forwarder, 0)


class Layers(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layers(x), "mean")


def in_job(width: int, together: bool, parts: bool) -> poptorch.PoplarExecutor:
    """Return an executor. With ``parts``, each process has a part of the optimizer's state."""
    options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    where = poptorch.TensorLocationSettings().useReplicatedTensorSharding(parts)
    options.TensorLocations.setOptimizerLocation(where)
    if not together:
        options.Distributed.disable()
    model = Layers(width)
    return poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.01))


CALLS = 4  # one after another, so that it does not matter which one started first


def several(model: poptorch.PoplarExecutor, batch: torch.Tensor) -> None:
    for _ in range(CALLS):
        model(batch)


def curve(rate: float, rounds: int, parts: bool) -> None:
    """Print predicted and measured times of a call for each latency and size of the gradients."""
    own = {width: (in_job(width, True, parts), in_job(width, False, parts)) for width in WIDTHS}
    batches = {width: torch.zeros(1, width) for width in WIDTHS}
    errors = []
    for latency in LATENCIES:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(int(os.environ[FORWARDER]), signal.SIGUSR1)
        for width, (job, alone) in own.items():
            contestants = {
                "job": partial(several, job, batches[width]),
                "alone": partial(several, alone, batches[width]),
            }
            measured = turns(contestants, set(), rounds)["job"] / CALLS
            if dist.get_rank() == 0:
                link = {"latency": latency, "bandwidth": rate}
                counts = [dist.get_world_size()]
                made = alone.estimate(batches[width], processes=counts, **link).scaling
                assert made is not None
                row = made.rows[0]
                errors.append(abs(row.seconds / measured - 1))
                print(
                    f"{row.processes} processes, {latency * 1e3:4.1f} ms, {made.bytes / 2**20:4.2f}"
                    f" MiB: predicted {row.seconds * 1e3:7.2f} ms, of which computing "
                    f"{made.computing * 1e3:5.2f}, measured {measured * 1e3:7.2f} ms, error "
                    f"{row.seconds / measured - 1:+.0%}",
                    flush=True,
                )
    if errors:
        print(f"median error {statistics.median(errors):.1%}")


CUTS = {"cut": -math.inf, "chosen": early.__globals__["LEAST"], "whole": math.inf}
"""What has to be saved over the work, so that the library cuts."""


def compiled(work: Workload, backend: str, least: float) -> poptorch.PoplarExecutor:
    """Return the wrapped model, compiled for separate machines."""
    address = f"machine {dist.get_rank()}"
    apart = patch.object(_job, "own_address", lambda: address)
    with apart, patch.dict(early.__globals__, LEAST=least):
        model = wrapped(work, True, backend)
        model(*work.batch())
    return model


def measure(name: str, backend: str, rounds: int) -> None:
    """Print one row."""
    work = WORKLOADS[name]
    cut, chosen, whole = (compiled(work, backend, least) for least in CUTS.values())
    chose = "whole" if "nothing overlaps" in str(chosen.plan().program) else "cut"
    latency, bandwidth = chosen._session.now.compiled.plan.spec.target.link
    chosen.destroy()
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
            f"the cut's; one all_reduce of its gradients {took['plain'] * 1e3:6.2f} ms; measured "
            f"{1e3 * latency:.3g} ms, {8e-9 * bandwidth:.3g} Gb/s: {chose} chosen",
            flush=True,
        )
    cut.destroy()
    whole.destroy()


def start(rate: str) -> int:
    """Start this program on both hosts, or twice on this one. Return how it ended."""
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
    parser.add_argument("names", nargs="*", default=NAMES, help="models to train (default: all)")
    parser.add_argument(
        "--rate",
        help="rate of the link (default: 1gbit; in Mbit/s with --delayed and --curve: 200)",
    )
    parser.add_argument(
        "--curve", type=int, metavar="N", help="measure N processes over links with three latencies"
    )
    parser.add_argument(
        "--delayed", action="store_true", help="delay packets in this program, by 1 ms one way"
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="with --curve, divide the optimizer state among the processes",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="updates of each contestant (default: 20)"
    )
    parser.add_argument(
        "--backend", default="optimise", help="backend that runs the programs (default: optimise)"
    )
    chosen = parser.parse_args()
    count = chosen.curve or (2 if chosen.delayed else 0)
    rate = float(chosen.rate or 200) * 1e6 / 8 if count else 0.0
    if "RANK" not in os.environ:
        return start_curve(count, rate) if count else start(chosen.rate or "1gbit")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if chosen.curve:
        curve(rate, chosen.rounds, chosen.parts)
        return 0
    if chosen.delayed and dist.get_rank() == 0:
        os.kill(int(os.environ[FORWARDER]), signal.SIGUSR1)
    for name in chosen.names:
        measure(name, chosen.backend, chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
