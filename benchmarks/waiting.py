"""Measure updates of equal stages on several processes, and how long the processes wait.

Usage: python benchmarks/waiting.py [--processes 2 4] [--accumulation 4 8 16] [--against CHECKOUT]

Each process has one thread, and its own core if there are enough. Alternating with the pipeline,
all processes run all stages for themselves at the same time. The time of this, divided by the
number of processes, is the ideal time: cores that share caches and power affect both. Waiting is
the time in which a process has nothing to compute because another process has not finished its next
input (the bubble, which the plan predicts). With ``--against``, jobs of another checkout alternate
with jobs of this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import poptorch
from poptorch.backends.peers import MessagesOfRun, Peers

ROOT = Path(__file__).resolve().parent.parent
waited = [0.0]  # seconds that this process waits for values of others
WIDTH, LAYERS, SAMPLES, UPDATES = 512, 4, 128, 2  # of weights, a stage, a micro-batch, a call


class Model(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for number in range(stages):
            layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
            self.stages.append(poptorch.BeginBlock(nn.Sequential(*layers), ipu_id=number))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return nn.functional.mse_loss(x, y)


def wrapped(stages: int, accumulation: int, grouped: bool, alone: bool) -> poptorch.PoplarExecutor:
    options = poptorch.Options().backend("staged").showCompilationProgressBar(False)
    options.deviceIterations(UPDATES).Training.gradientAccumulation(accumulation)
    options.setExecutionStrategy(poptorch.PipelinedExecution().useInterleavedSchedule(not grouped))
    options._Popart.set("autoRecomputation", 0)  # the last stage would have nothing to recompute
    job = options.Distributed
    job.disable() if alone else job.stageProcesses(stages)
    return poptorch.trainingModel(Model(stages), options)


def cores() -> list[int]:
    """Return this process's cores. Second hardware threads of a core are last."""
    seen: list[str] = []
    order = []
    for core in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        seen.append(path.read_text() if path.exists() else str(core))
        order.append((seen.count(seen[-1]), core))
    return [core for _, core in sorted(order)]


def timed(wait: Callable[..., None]) -> Callable[..., None]:
    def waiting(*given: Any) -> None:
        start = time.perf_counter()
        wait(*given)
        waited[0] += time.perf_counter() - start

    return waiting


def measure(processes: int, accumulation: int, rounds: int, grouped: bool) -> None:
    both, one = (wrapped(processes, accumulation, grouped, alone) for alone in (False, True))
    torch.manual_seed(0)
    batch = torch.randn(2, UPDATES * accumulation * SAMPLES, WIDTH)
    contestants = {"both": both, "each": one, "one": one}
    times: dict[str, list[float]] = {name: [] for name in [*contestants, "waiting"]}
    for _ in range(rounds + 1):
        for name, executor in contestants.items():
            dist.barrier()
            start, waited[0] = time.perf_counter(), 0.0
            if name != "one" or dist.get_rank() == 0:
                executor(*batch)
            times[name].append((time.perf_counter() - start) / UPDATES * 1e3)
            if name == "both":
                share = torch.tensor(waited[0] / UPDATES * 1e3 / times[name][-1] / processes)
                dist.all_reduce(share)
                times["waiting"].append(share.item())
    medians = (statistics.median(of[1:]) for of in times.values())  # the first call compiles
    took, each, alone, waiting = medians
    staged, ideal = both.plan().staged, each / processes
    if dist.get_rank() == 0 and staged is not None:
        print(
            f"{processes} processes, {accumulation:2d} micro-batches: {took:6.1f} ms an update, "
            f"ideal {ideal:6.1f} ({1 - ideal / took:5.1%} are missing), of one alone "
            f"{alone / processes:6.1f}; waiting {waiting:5.1%}, predicted {staged.bubble:5.1%}",
            flush=True,
        )
    both.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[2, 4],
        help="numbers of processes (default: 2 4)",
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        nargs="+",
        default=[4, 8, 16],
        help="numbers of micro-batches in an update (default: 4 8 16)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each figure (default: 5)"
    )
    parser.add_argument(
        "--grouped", action="store_true", help="use the default schedule instead of 1F1B"
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured alternately")
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        for count in chosen.processes:
            for checkout in [ROOT, chosen.against] if chosen.against else [ROOT]:
                print(checkout, flush=True)
                launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
                more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout / "src")}
                command = [sys.executable, "-m", *launcher, *sys.argv]
                subprocess.run(command, env={**os.environ, **more}, check=True)
        return 0
    dist.init_process_group("gloo")
    MessagesOfRun.receive_due, MessagesOfRun.end = (
        timed(MessagesOfRun.receive_due),
        timed(MessagesOfRun.end),
    )  # type: ignore[method-assign]
    Peers.share = timed(Peers.share)  # type: ignore[method-assign]
    own, processes = cores(), dist.get_world_size()
    if len(own) >= processes:
        os.sched_setaffinity(0, {own[dist.get_rank()]})
    for accumulation in chosen.accumulation:
        if accumulation >= 2 * processes - 1:  # the minimum for a pipeline
            measure(processes, accumulation, chosen.rounds, chosen.grouped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
