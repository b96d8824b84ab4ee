"""Measure several processes with one thread each against one process, DDP and a plain all_reduce.

Three comparisons: the job against a single process that does the same work alone; the job against
torch's DDP, eager and compiled; and the reduction of the gradients against one all_reduce of the
same number of bytes.

Usage: python benchmarks/processes.py [NAME ...] [--processes N ...] [--backend NAME] [--rounds N]

The contestants alternate in one job. If there are enough cores, each process has its own. While one
process works alone, the others wait in an exchange, which takes no processor time. A row is a line
of JSON: median milliseconds of the slowest process in each round. Limits: a weak scaling of at
least 0.9 for BERT; DDP must not be faster than ours; the reduction takes at most 1.15 times as long
as one all_reduce.

``apart`` is the same work in all processes without an exchange. It shows how much the processes
slow each other down. ``beside`` is one all_reduce that runs during the computation, and ``after``
is one that follows it. Their difference is the most that overlapping could gain.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
    """Return the wrapped model, for one process among several or for a single process."""
    given = ingredients(work)
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(work.accumulation)
    if not together:
        options.Distributed.disable()
    return poptorch.trainingModel(given.net, options, given.optimizer)


def ddp(work: Workload, compiled: bool = False) -> Step:
    """Return a careful step with DistributedDataParallel: one reduction for each update.

    When compiled, torch cuts the graph at DDP's buckets, so that gradients are sent during the
    backward pass.
    """
    given = ingredients(work, fused=True)
    parallel = nn.parallel.DistributedDataParallel(given.net, gradient_as_bucket_view=True)
    net = torch.compile(parallel) if compiled else parallel
    optimizer, micro = given.optimizer, work.micro
    assert optimizer is not None

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        parts = [part.split(micro) for part in given.batch]
        pairs = [*zip(*parts, strict=True)]
        with parallel.no_sync():
            for x, y in pairs[:-1]:
                (net(x, y)[-1] / len(pairs)).backward()
        x, y = pairs[-1]
        (net(x, y)[-1] / len(pairs)).backward()
        optimizer.step()

    return step


def reductions(executor: poptorch.PoplarExecutor) -> tuple[Step, Callable[[], Any]]:
    """Return a program's reduction alone, and a function that starts an all_reduce of its size."""
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


WARM = 3  # rounds that do not count


def turns(contestants: dict[str, Step], alone: set[str], rounds: int) -> dict[str, float]:
    """Return median seconds. The contestants alternate, and all processes wait for each other.

    Every second round is in reverse order, because a contestant that follows a computation finds
    nothing in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + WARM):
        for name, step in [*contestants.items()][:: -1 if at % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            if name not in alone or dist.get_rank() == 0:
                step()
            if at >= WARM:
                times[name].append(time.perf_counter() - start)
    slowest = torch.tensor([times[name] for name in contestants], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(contestants, map(statistics.median, slowest.tolist()), strict=True))


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin() -> bool:
    """Give each process of the job its own core, if there are enough.

    This moves all threads of a process. The compiling threads have ended by now, and the threads of
    gloo exist.
    """
    own = cores()
    if len(own) < dist.get_world_size():
        return False
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {own[dist.get_rank()]})
    return True


def measure(name: str, backend: str, rounds: int) -> None:
    """Print one row."""
    work = WORKLOADS[name]
    everywhere = cores()
    job, one = wrapped(work, True, backend), wrapped(work, False, backend)
    batch = work.batch()
    eager, compiled = ddp(work), ddp(work, compiled=True)
    for compiles in (lambda: job(*batch), lambda: one(*batch), compiled):
        compiles()
    reduction, begin = reductions(job)

    def after() -> None:
        one(*batch)
        begin().wait()

    def beside() -> None:
        begun = begin()
        one(*batch)
        begun.wait()

    contestants: dict[str, Step] = {
        "job": lambda: job(*batch), "ddp": eager, "reduction": reduction,
        "plain": lambda: begin().wait(), "alone": lambda: one(*batch), "ddp_compiled": compiled,
        "apart": lambda: one(*batch), "after": after, "beside": beside,
    }  # fmt: skip
    pinned = pin()
    took = turns(contestants, {"alone"}, rounds)
    if dist.get_rank() == 0:
        row = {
            "workload": name, "processes": dist.get_world_size(), "cores": len(everywhere),
            "pinned": pinned, "weak_scaling": took["alone"] / took["job"],
            "ddp_over_job": took["ddp"] / took["job"],
            "ddp_compiled_over_job": took["ddp_compiled"] / took["job"],
            "reduction_over_plain": took["reduction"] / took["plain"],
            "beside_over_after": took["beside"] / took["after"],
            "ms": {contestant: round(1e3 * seconds, 3) for contestant, seconds in took.items()},
        }  # fmt: skip
        shown = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
        print(json.dumps(shown), flush=True)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), everywhere)
    job.destroy()
    one.destroy()


def start(count: int) -> int:
    """Start a job of ``count`` processes of this program. Return how it ended."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env={**variables, "RANK": str(rank)})
        for rank in range(count)
    ]
    return max(process.wait() for process in processes)


def main() -> int:
    """Start one job after another, or run one process of a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, help="models to train (default: all)")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[2],
        metavar="N",
        help="numbers of processes to measure (default: 2)",
    )
    parser.add_argument(
        "--backend", default="optimise", help="backend that runs the programs (default: optimise)"
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="updates of each contestant (default: 30)"
    )
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        return max(start(count) for count in chosen.processes)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in chosen.names:
        measure(name, chosen.backend, chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
