"""Measure the cost of a call and of compiling for 1, 10 and 100 iterations and accumulation steps.

Every measurement has its own process and an empty cache. Only the compiler's precompiled headers,
which are created once on each machine, already exist.

Usage: python benchmarks/growth.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COUNTS = (1, 10, 100)
SERIES = {
    "training, iterations": {"optimizer": "SGD", "count": "iterations"},
    "training, accumulation": {"optimizer": "SGD", "count": "accumulation"},
    "inference, iterations": {"optimizer": None, "count": "iterations"},
}


def main() -> None:
    """Print all series, or measure one point of one series."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--point", nargs=2, metavar=("SERIES", "COUNT"), help=argparse.SUPPRESS)
    point = parser.parse_args().point
    if point is not None:
        print("FIGURES " + json.dumps(measure(point[0], int(point[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        headers = Path(folder) / "headers"
        start("headers", 1, headers)
        for series in SERIES:
            for count in COUNTS:
                cache = Path(folder) / f"{len(os.listdir(folder))}"  # torch does not accept spaces
                shutil.copytree(headers, cache)
                compiling, call = start(series, count, cache)
                print(
                    f"{series:24s} {count:4d}: compiling {compiling:6.2f} s, "
                    f"a call {call * 1e3:8.2f} ms",
                    flush=True,
                )


def start(series: str, count: int, cache: Path) -> tuple[float, float]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--point", series, str(count)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for text in done.stdout.splitlines():
        if text.startswith("FIGURES "):
            compiling, call = json.loads(text.removeprefix("FIGURES "))
            return compiling, call
    raise SystemExit(f"{series}, {count}: failed\n{done.stderr[-3000:]}")


def measure(series: str, count: int) -> tuple[float, float]:
    """Return the seconds of compiling, including capture, and of a call, on one thread."""
    import torch

    import contestants
    from workloads import WORKLOADS

    torch.set_num_threads(1)
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64))  # costs that occur once in a process
    if series == "headers":
        return 0.0, 0.0
    chosen = SERIES[series]
    counts = {str(chosen["count"]): count}
    work = dataclasses.replace(WORKLOADS["cnn"], micro=4, optimizer=chosen["optimizer"], **counts)  # type: ignore[arg-type]
    begin = time.perf_counter()
    step, _ = contestants.ours(work, "optimise")
    step()
    compiling = time.perf_counter() - begin
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return compiling, statistics.median(times)


if __name__ == "__main__":
    main()
