"""Seconds from the first call to the first result and to full speed, with nothing cached.

Each figure comes from a process of its own with empty cache and temporary folders. Another source
tree can be measured in turn with this one, because only ratios of neighbouring runs mean something
on a busy machine.

Usage: python benchmarks/first_minute.py [NAME ...] [--modes auto] [--against TREE] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
NAMES = ("cnn", "mlp", "lstm", "bert", "resnet")
# Seconds to full speed with "auto", and to the first result with "optimise", on two quiet cores.
GOALS = {"cnn": (9, 8), "mlp": (7, 6), "lstm": (10, 9), "bert": (22, 20), "resnet": (35, 32)}
LONGEST = 400.0
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR", "POPART_CACHE_DIR", "TRITON_CACHE_DIR")


def inside(name: str, mode: str) -> None:
    """Run a workload until it has full speed and print the seconds; in a process of its own."""
    import contestants

    work = WORKLOADS[name]
    started = time.perf_counter()
    step, executor = contestants.ours(work, mode)
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


def fresh(name: str, mode: str, tree: Path) -> dict[str, float]:
    """Measure one workload in a new process for which nothing is cached."""
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


def main() -> None:
    """Print a table, a line per workload, mode and tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--modes", nargs="+", default=("auto", "optimise"))
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen.names[0], chosen.inside)
        return
    trees = {"here": HERE.parent} | ({"there": chosen.against} if chosen.against else {})
    for name in chosen.names:
        for mode in chosen.modes:
            found: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
            for _ in range(chosen.rounds):
                for tree, path in trees.items():
                    found[tree].append(fresh(name, mode, path))
            goal = GOALS[name][mode != "auto"]
            for tree, runs in found.items():
                first, full, calls, used, load = (
                    statistics.median(run[part] for run in runs)
                    for part in ("first", "full", "calls", "processor", "load")
                )
                print(
                    f"{name:8s} {mode:9s} {tree:6s} first result {first:6.1f} s, full speed "
                    f"{full:6.1f} s (call {calls:.0f}); processor {used:6.1f} s, load {load:.1f}; "
                    f"goal on two quiet cores {goal} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
