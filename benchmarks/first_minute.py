"""Seconds from the first call to the first result and to full speed, with nothing cached.

Each figure comes from a process of its own with empty cache and temporary folders; beside it stands
what ``torch.compile`` takes to its first result, which full speed should come before. Some rows are
fed as scripts are: by a loader over a ``TensorDataset``, the loss read after each call, and with
operators of the user's between calls, whose threads take time from the compiler. Another source
tree can be measured in turn with this one, because only ratios of neighbouring runs mean something
on a busy machine.

Usage: python benchmarks/first_minute.py [NAME ...] [--modes auto] [--against TREE] [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import poptorch
from poptorch import DataLoaderMode
from workloads import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
LONGEST = 400.0
ROWS_OF_DATA = 4096
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR", "POPART_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        workload: of the table of record.
        goals: seconds to full speed with "auto", and to the first result with "optimise", on two
            quiet cores.
        loader: how batches are fetched; None: each call has the same tensors.
        augmented: whether each batch is changed by a few operators first, on all threads.
    """

    workload: str
    goals: tuple[float, float]
    loader: DataLoaderMode | None = None
    augmented: bool = False


ROWS = {
    "cnn": Row("cnn", (9, 8)),
    "loader": Row("cnn", (9, 8), DataLoaderMode.Sync),
    "async": Row("cnn", (9, 8), DataLoaderMode.Async),
    "augmented": Row("cnn-16x8", (9, 8), DataLoaderMode.Sync, augmented=True),
    "mlp": Row("mlp", (7, 6)),
    "lstm": Row("lstm", (10, 9)),
    "bert": Row("bert", (22, 20)),
    "resnet": Row("resnet", (35, 32)),
}


def inside(row: Row, mode: str) -> None:
    """Run a workload until it has full speed and print the seconds; in a process of its own.

    Args:
        row: which.
        mode: a backend, or "torch.compile".
    """
    import contestants

    work = WORKLOADS[row.workload]
    form = {"foreach": True} if mode == "torch.compile" else {}
    given = contestants.ingredients(work, **form)  # torch's optimizers import its compiler
    started = time.perf_counter()
    if mode == "torch.compile":
        contestants.compiled(work, given)()
        seconds = time.perf_counter() - started
        print(json.dumps({"first": seconds, "full": seconds, "calls": 1}))
        return
    step, executor = contestants.ours(work, mode, given)
    if row.loader is not None:
        step = fed(work, executor, row.loader, row.augmented)
    step()
    first = time.perf_counter() - started
    calls = 1
    while executor._executable.report().backend == "reference":
        if time.perf_counter() - started > LONGEST:
            break
        step()
        calls += 1
    full = time.perf_counter() - started
    print(json.dumps({"first": first, "full": full, "calls": calls}))


def fed(
    work: Workload, executor: poptorch.PoplarExecutor, mode: DataLoaderMode, augmented: bool
) -> Callable[[], float]:
    """Return a call of a wrapped model as a script makes it."""
    loader = poptorch.DataLoader(
        executor.options,
        TensorDataset(*work.data(ROWS_OF_DATA)),
        batch_size=work.micro,
        shuffle=True,
        mode=mode,
    )

    def endless() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def step() -> float:
        x, y = next(batches)
        if augmented:
            x = (x.flip(-1) * 0.9 + x.roll(1, -2) * 0.1).clamp(-3, 3)
        _, loss = executor(x, y)
        return float(loss)

    return step


def fresh(name: str, mode: str, tree: Path) -> dict[str, float]:
    """Measure one row in a new process for which nothing is cached."""
    with tempfile.TemporaryDirectory(prefix="first-minute-") as folder:
        environment = {key: value for key, value in os.environ.items() if key not in CACHES}
        environment |= {"TMPDIR": folder, "HOME": folder, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, __file__, "--inside", mode, name]
        before = _processor_seconds()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {mode}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"processor": _processor_seconds() - before, "load": os.getloadavg()[0]}


def _processor_seconds() -> float:
    """Return what all ended processes that this one started have used, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@functools.cache
def torch_compile(workload: str, rounds: int) -> float:
    """Return the seconds to the first result of ``torch.compile``, of rows with one model once."""
    name = next(name for name, row in ROWS.items() if row.workload == workload)
    runs = [fresh(name, "torch.compile", HERE.parent) for _ in range(rounds)]
    return statistics.median(run["first"] for run in runs)


def main() -> None:
    """Print a table, a line per row, mode and tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ROWS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=("auto", "optimise"))
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(ROWS[chosen.names[0]], chosen.inside)
        return
    trees = {"here": HERE.parent} | ({"there": chosen.against} if chosen.against else {})
    for name in chosen.names:
        other = torch_compile(ROWS[name].workload, chosen.rounds)
        print(f"{name:9s} torch.compile    first result {other:6.1f} s", flush=True)
        for mode in chosen.modes if ROWS[name].loader is None else ("auto",):
            runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
            for _ in range(chosen.rounds):
                for tree, path in trees.items():
                    runs[tree].append(fresh(name, mode, path))
            for tree, figures in runs.items():
                print(line(name, mode, tree, figures, other), flush=True)


def line(name: str, mode: str, tree: str, runs: list[dict[str, float]], other: float) -> str:
    """Return the medians of some runs in words."""
    first, full, calls, used, load = (
        statistics.median(run[part] for run in runs)
        for part in ("first", "full", "calls", "processor", "load")
    )
    goal = ROWS[name].goals[mode != "auto"]
    return (
        f"{name:9s} {mode:9s} {tree:6s} first result {first:6.1f} s, full speed {full:6.1f} s "
        f"(call {calls:.0f}), {full / other:4.2f} of torch.compile's; processor {used:6.1f} s, "
        f"load {load:.1f}; goal on two quiet cores {goal} s"
    )


if __name__ == "__main__":
    main()
