"""Measure the seconds from the first call to the first result and to full speed, without any cache.

Each figure comes from its own process with empty cache and temporary folders. For comparison, the
benchmark prints the time of ``torch.compile`` to its first result; full speed should be reached
earlier. Some rows imitate scripts: a loader over a ``TensorDataset`` provides the batches, the loss
is read after each call, and the user's operators run between calls, so their threads compete with
the compiler. On a busy machine, only ratios of neighbouring runs are meaningful, so ``--against``
measures another source tree alternately with this one.

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
    """One row of the output.

    Attributes:
        workload: a workload of the main speed table.
        goals: the allowed seconds to full speed with "auto", and to the first result with
            "optimise", on two idle cores.
        loader: how batches are fetched. None: all calls have the same tensors.
        augmented: whether a few operators on all threads change each batch first.
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
    """Run a workload in this process until it reaches full speed, and print the seconds.

    Args:
        row: the row to measure.
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
    """Return a call of a wrapped model with the batches and operators of the row."""
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
    """Measure one row in a new process without any cached files."""
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
    """Return the processor seconds of all descendants of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@functools.cache
def torch_compile(workload: str, rounds: int) -> float:
    """Return the seconds of ``torch.compile`` to its first result. Rows with the same model are
    measured once.
    """
    name = next(name for name, row in ROWS.items() if row.workload == workload)
    runs = [fresh(name, "torch.compile", HERE.parent) for _ in range(rounds)]
    return statistics.median(run["first"] for run in runs)


def main() -> None:
    """Print a line for each row, mode and source tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        default=list(ROWS),
        metavar="NAME",
        help="rows to measure (default: all)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=("auto", "optimise"),
        help="backends to measure (default: auto optimise)",
    )
    parser.add_argument("--against", type=Path, help="another source tree, measured alternately")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of each figure (default: 1)"
    )
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
    """Return a line with the medians of several runs."""
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
