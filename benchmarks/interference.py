"""Compare the time of a training step next to a busy process with its time on an idle machine.

On two cores, the step may take at most 2.5 times as long.

Usage: python benchmarks/interference.py [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import contestants
from workloads import WORKLOADS

LIMIT = 2.5
NAMES = ("cnn", "mlp", "cnn-1x16", "bert")
SETTLING = 3.0  # seconds for finding the number of threads


def median(step: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a step, measured over some time."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    """Print both times. The exit status says whether the limit holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=NAMES, help="workloads to measure (default: all)"
    )
    status = 0
    torch.set_num_threads(2)
    for name in parser.parse_args().names:
        work = WORKLOADS[name]
        steps = {"ours": contestants.ours(work, "optimise")[0], "eager": contestants.eager(work)}
        for part, step in steps.items():
            median(step, SETTLING)
            quiet = median(step, SETTLING)
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
                try:
                    first = median(step, SETTLING)
                    busy = median(step, SETTLING)
                finally:
                    neighbour.kill()
            ratio = busy / quiet
            status |= part == "ours" and ratio > LIMIT
            print(
                f"{name:10s} {part:6s} quiet {quiet * 1e3:8.2f} ms, next to a busy process "
                f"{busy * 1e3:8.2f} ms: {ratio:5.2f} times (at first {first / quiet:5.2f})",
                flush=True,
            )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
