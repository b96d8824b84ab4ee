"""Two processes of one thread each: against one with twice the work, against torch's DDP, and the
reduction against one all_reduce of the same bytes, after the computation and beside it.

Usage: python benchmarks/processes.py [NAME ...] [--backend NAME] [--rounds N]

The contestants take turns in one job of two processes. While one process works alone the other
waits in an exchange, which takes no processor time. Floors: 0.85 of twice the speed of one process;
faster than DDP; the reduction within 1.15 of one all_reduce. What a reduction would take that runs
beside the whole computation, rather than after it, is the most that an overlap could bring.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import poptorch
from contestants import ingredients
from poptorch import _job
from poptorch._ir.program import Reduce
from poptorch.backends import driver
from workloads import WORKLOADS, Workload

NAMES = ("cnn-16x8", "bert", "mlp")
Step = Callable[[], object]


def wrapped(work: Workload, together: bool, backend: str) -> poptorch.PoplarExecutor:
    """Return the wrapped model: of one process among two, or of one alone with twice the work."""
    given = ingredients(work)
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(work.accumulation * (1 if together else 2))
    if not together:
        options.Distributed.disable()
    return poptorch.trainingModel(given.net, options, given.optimizer)


def ddp(work: Workload) -> Step:
    """Return a careful step with DistributedDataParallel: one reduction for each update."""
    given = ingredients(work, fused=True)
    net = nn.parallel.DistributedDataParallel(given.net, gradient_as_bucket_view=True)
    optimizer, micro = given.optimizer, work.micro
    assert optimizer is not None

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        parts = [part.split(micro) for part in given.batch]
        pairs = [*zip(*parts, strict=True)]
        with net.no_sync():
            for x, y in pairs[:-1]:
                (net(x, y)[-1] / len(pairs)).backward()
        x, y = pairs[-1]
        (net(x, y)[-1] / len(pairs)).backward()
        optimizer.step()

    return step


def reductions(executor: poptorch.PoplarExecutor) -> tuple[Step, Callable[[], Any]]:
    """Return the reduction of a program alone, and what begins one all_reduce of as many bytes."""
    session: Any = executor._session
    state = session.weights.store.state
    program = session.now.compiled.plan.program
    nodes = [node for node in program.walk() if isinstance(node, Reduce)]
    flat = torch.zeros(sum(node.bytes for node in nodes) // 4)
    group = _job.current()._pg

    def exchanged() -> None:
        begun: list[Any] = []
        for node in nodes:
            begun = driver.exchange(node, state, begun)

    return exchanged, lambda: dist.all_reduce(flat, group=group, async_op=True)


def turns(contestants: dict[str, Step], alone: set[str], rounds: int) -> dict[str, float]:
    """Return median seconds; contestants take turns, and all processes wait for one another.

    Every other round is in reverse: who comes after a computation finds nothing in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 3):
        for name, step in [*contestants.items()][:: -1 if at % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            if name not in alone or dist.get_rank() == 0:
                step()
            if at >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(name: str, backend: str, rounds: int) -> None:
    """Print one row."""
    work = WORKLOADS[name]
    twice = replace(work, accumulation=2 * work.accumulation)
    both, one = wrapped(work, True, backend), wrapped(work, False, backend)
    batch, large = work.batch(), twice.batch()
    both(*batch)  # which compiles it
    one(*large)
    reduction, begin = reductions(both)

    def after() -> None:
        one(*large)
        begin().wait()

    def beside() -> None:
        begun = begin()
        one(*large)
        begun.wait()

    contestants: dict[str, Step] = {
        "two": lambda: both(*batch), "ddp": ddp(work), "reduction": reduction,
        "plain": lambda: begin().wait(), "one": lambda: one(*large), "after": after,
        "beside": beside,
    }  # fmt: skip
    took = turns(contestants, {"one"}, rounds)
    if dist.get_rank() == 0:
        print(
            f"{name:10s} two processes {took['two'] * 1e3:8.2f} ms a call; "
            f"{took['one'] / took['two'] / 2:4.2f} of twice the speed of one; "
            f"{took['ddp'] / took['two']:4.2f} x DDP; "
            f"reduction {took['reduction'] * 1e3:6.2f} ms, {took['reduction'] / took['plain']:4.2f}"
            f" of one all_reduce; beside the computation {took['beside'] / took['after']:4.2f} of"
            " after it",
            flush=True,
        )
    both.destroy()


def main() -> int:
    """Start the two processes, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--backend", default="optimise")
    parser.add_argument("--rounds", type=int, default=50)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        for name in chosen.names:
            measure(name, chosen.backend, chosen.rounds)
        return 0
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env={**variables, "RANK": str(rank)})
        for rank in range(2)
    ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
