"""How the cost of a call and of compiling grow with iterations and accumulation: 1, 10, 100.

Compiled with nothing kept on disk or in the process. Usage: python benchmarks/growth.py
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch

import contestants
from poptorch._compile import cache, code
from workloads import WORKLOADS

COUNTS = (1, 10, 100)


def measure(**counts: int) -> tuple[float, float]:
    """Return seconds of compiling (capture included) and of a call."""
    code._loaded.clear()
    work = dataclasses.replace(WORKLOADS["cnn"], micro=4, **counts)
    start = time.perf_counter()
    step, _ = contestants.ours(work, "optimise")
    step()
    compiling = time.perf_counter() - start
    times = []
    for _ in range(12):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return compiling, statistics.median(times)


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache.default_store = lambda: code.Store(Path(tempfile.mkdtemp(dir=folder)))
        _compare()


def _compare() -> None:
    measure()  # what a process pays once
    for what in ("iterations", "accumulation"):
        for count in COUNTS:
            compiling, call = measure(**{what: count})
            print(
                f"{what:12s} {count:4d}: compiling {compiling:6.2f} s, a call {call * 1e3:8.2f} ms"
            )


if __name__ == "__main__":
    main()
