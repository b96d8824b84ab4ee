"""Create the main speed table: workloads against the eager loop, ``torch.compile`` and JAX.

Every workload runs in its own processes with an empty compiler cache. Only the precompiled headers,
which are created once on each machine, already exist. First, each contestant runs alone: the table
shows the seconds from wrapping to the first result and to full speed, and the peak memory. A second
process then starts with the cache of the first one. Finally, all contestants alternate in one
process.

Usage: python benchmarks/speed.py [--quick] [--only NAME ...] [--threads 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads import QUICK, WORKLOADS, Workload

Figures = dict[str, Any]
JAX = Path(__file__).resolve().parent.parent / ".venv-jax" / "bin" / "python"


def main() -> None:
    """Create the table, or run one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="measure three workloads in fewer rounds"
    )
    parser.add_argument(
        "--only", nargs="+", choices=WORKLOADS, metavar="NAME", help="measure only these workloads"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="number of threads (default: all cores)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file to which the rows are added; a .md file is written next to it",
    )
    parser.add_argument("--jax", type=Path, default=JAX, help="Python interpreter with JAX")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print("FIGURES " + json.dumps(child(*chosen.child, chosen)))
        return
    rows = json.loads(chosen.out.read_text()) if chosen.out and chosen.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        headers = Path(folder) / "headers"
        start("cnn", "headers", headers, chosen)
        for name in chosen.only or (QUICK if chosen.quick else WORKLOADS):
            rows[name] = measure(name, headers, Path(folder) / name, chosen)
            print(line(WORKLOADS[name], rows[name]), flush=True)
            if chosen.out:
                chosen.out.write_text(json.dumps(rows, indent=1))
    if chosen.out:
        chosen.out.with_suffix(".md").write_text(document(rows, chosen.threads))


def measure(name: str, headers: Path, cache: Path, chosen: argparse.Namespace) -> Figures:
    """Return all figures of one workload."""
    shutil.copytree(headers, cache)
    found = {
        f"{part}-alone": start(name, part, cache, chosen) for part in ("eager", "compile", "ours")
    }
    found["ours-again"] = start(name, "ours", cache, chosen)
    return {**found, **start(name, "turns", cache, chosen)}


def start(name: str, part: str, cache: Path, chosen: argparse.Namespace) -> Figures:
    """Run one process and return what it measured."""
    command = [sys.executable, __file__, "--child", name, part, "--threads", str(chosen.threads)]
    command += ["--jax", str(chosen.jax)]
    if chosen.quick:
        command.append("--quick")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for text in done.stdout.splitlines():
        if text.startswith("FIGURES "):
            figures: Figures = json.loads(text.removeprefix("FIGURES "))
            return figures
    raise SystemExit(f"{name}, {part}: failed\n{done.stderr[-3000:]}")


def child(name: str, part: str, chosen: argparse.Namespace) -> Figures:
    """Measure one part in this process."""
    import torch

    torch.set_num_threads(chosen.threads)
    work = WORKLOADS[name]
    if part == "turns":
        return turns(name, chosen)
    if part == "headers":
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
        return {}
    return alone(work, part)


def alone(work: Workload, part: str) -> Figures:
    """Return seconds to the first result and to full speed, and the peak memory in megabytes."""
    import contestants

    form = {"eager": {"fused": True}, "compile": {"foreach": True}, "ours": {}}[part]
    given = contestants.ingredients(work, **form)
    before = _peak()
    begin = time.perf_counter()
    if part == "ours":
        step, wrapped = contestants.ours(work, "auto", given)
    else:
        step = (contestants.eager if part == "eager" else contestants.compiled)(work, given)
    step()
    first = time.perf_counter() - begin
    if part == "ours":
        while getattr(wrapped._executable, "waiting", False):
            step()
    full = time.perf_counter() - begin
    for _ in range(5):
        step()
    return {"first": first, "full": full, "megabytes": _peak() - before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def turns(name: str, chosen: argparse.Namespace) -> Figures:
    """Return medians of alternating runs, and the share of the machine's peak matmul rate."""
    import contestants
    from harness import alternate, medians

    work = WORKLOADS[name]
    steps: dict[str, Callable[[], object]] = {"eager": contestants.eager(work)}
    if work.optimizer is not None:
        foreach = contestants.ingredients(work, foreach=True)
        steps["foreach"] = contestants.eager(work, foreach)
    steps["compile"] = contestants.compiled(work)
    steps["ours"] = contestants.ours(work, "inductor")[0]
    steps["interpreted"] = contestants.ours(work, "reference")[0]
    jax = None
    if chosen.jax.exists() and name in contestants.Jax.WORKLOADS:
        steps["jax"] = jax = contestants.Jax(chosen.jax, name, chosen.threads)
    once = medians(alternate(steps, 3, warmup=3))
    seconds = 4.0 if chosen.quick else 15.0
    rounds = max(11, min(1000, int(seconds / sum(once.values()))))
    middle = medians(alternate(steps, rounds, warmup=3))
    eager = min(middle["eager"], middle.get("foreach", float("inf")))
    median = {"eager": eager, **{part: middle[part] for part in ("compile", "ours", "interpreted")}}
    figures: Figures = {"rounds": rounds}
    if jax is not None:  # measured by JAX itself, without the communication between the processes
        median["jax"] = medians({"jax": jax.seconds[-rounds:]})["jax"]
        figures["jax compiling"] = jax.compiling
        jax.end()
    flops = _flops(steps["eager"])
    rates = {part: flops / seconds / _matmul_peak() for part, seconds in median.items()}
    return figures | {"seconds": median, "flops": flops, "shares": rates}


def _flops(step: Callable[[], object]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def _matmul_peak(size: int = 1024) -> float:
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def line(work: Workload, row: Figures) -> str:
    """Return one row of the table as text."""
    seconds = row["seconds"]
    eager, other = (seconds[part] / seconds["ours"] for part in ("eager", "compile"))
    jax = f"  JAX {seconds['jax'] / seconds['ours']:5.2f}" if "jax" in seconds else ""
    interpreted = seconds["interpreted"] / seconds["eager"]
    marks = ["" if got >= expected else "!" for got, expected in zip((eager, other), work.floors)]  # noqa: B905
    return (
        f"{work.title:36s} {seconds['ours'] * 1e3:8.2f} ms  eager {eager:5.2f}{marks[0]:1s}"
        f" ({work.floors[0]})  compile {other:5.2f}{marks[1]:1s} ({work.floors[1]}){jax}"
        f"  interpreted / eager {interpreted:.2f}{'!' if interpreted > 1 else ''}"
        f"  first {row['ours-alone']['first']:.2f} s, full {row['ours-alone']['full']:.1f} s,"
        f" again {row['ours-again']['full']:.2f} s;"
        f" torch.compile {row['compile-alone']['full']:.1f} s"
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).resolve().parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


def document(rows: dict[str, Figures], threads: int) -> str:
    """Return the table as a page, with the machine, the version and the commit."""
    import torch

    import poptorch

    today = datetime.date.today().isoformat()
    lines = [
        f"# Speed, {today}",
        "",
        f"{_processor()}, {os.cpu_count()} cores, {threads} threads, "
        f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB; "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, poptorch {poptorch.__version__}, commit {_commit()}, float32 unless "
        "the row names another type.",
        "",
        "## Steps",
        "",
        "The table shows milliseconds per call: medians of runs that alternate. A ratio is the "
        "time of the other system divided by ours. The goal is in brackets, and a ratio that "
        "misses it "
        'is **bold**. "Interpreted / eager" is the time of a step on the interpreter, before '
        "compiled code takes over, divided by the time of eager PyTorch; the goal is at most 1. "
        '"Share" is the rate of floating-point operations of the model, divided by the measured '
        "rate of a 1024 x 1024 x 1024 matrix product.",
        "",
        "| workload | eager | torch.compile | JAX | poptorch | vs eager | vs torch.compile "
        "| vs JAX | interpreted / eager | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        work, seconds = WORKLOADS[name], row["seconds"]
        parts = ("eager", "compile", "jax", "ours")
        cells = [f"{seconds[part] * 1e3:.2f}" if part in seconds else "" for part in parts]
        for part, floor in zip(("eager", "compile"), work.floors, strict=True):
            ratio = seconds[part] / seconds["ours"]
            text = f"{ratio:.2f}" if ratio >= floor else f"**{ratio:.2f}**"
            cells.append(f"{text} ({floor})")
        cells.append(f"{seconds['jax'] / seconds['ours']:.2f}" if "jax" in seconds else "")
        interpreted = f"{seconds['interpreted'] / seconds['eager']:.2f}"
        cells.append(interpreted if float(interpreted) <= 1 else f"**{interpreted}**")
        cells.append(f"{row['shares']['ours']:.0%}")
        lines.append(f"| {work.title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## First results and memory",
        "",
        "The table shows the seconds from wrapping (after all imports) to the first result and to "
        "full speed, in a process that finds no compiled code and in a second process. Peak memory "
        "is in megabytes, in addition to the memory that the process had before, and includes the "
        "memory of the compiler.",
        "",
        "| workload | first | full | second process: first | full | torch.compile: first "
        "| JAX: first | MB eager | MB torch.compile | MB poptorch, second process |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        alone, again = row["ours-alone"], row["ours-again"]
        cells = [f"{alone['first']:.2f}", f"{alone['full']:.1f}", f"{again['first']:.2f}"]
        cells += [f"{again['full']:.2f}", f"{row['compile-alone']['first']:.1f}"]
        cells.append(f"{row['jax compiling']:.1f}" if "jax compiling" in row else "")
        parts = ("eager-alone", "compile-alone", "ours-again")
        cells += [f"{row[part]['megabytes']:.0f}" for part in parts]
        lines.append(f"| {WORKLOADS[name].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
