"""Processor seconds from nothing to the first optimised step, by part.

Each figure comes from a process of its own on one core with empty cache and temporary folders; all
processes that it starts count. On a shared machine only ratios of neighbouring runs mean something:
another source tree can be measured in turn with this one, and ``torch.compile`` stands beside.

Usage: python benchmarks/compile_cost.py [NAME ...] [--against TREE] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR", "POPART_CACHE_DIR", "TRITON_CACHE_DIR")
NAMES = ("mlp", "cnn", "bert-2", "lstm", "resnet")
PARTS = ("import torch", "import poptorch", "import compiler", "capture", "lowering", "C++")


def inside(name: str, contestant: str) -> None:
    """Take one step in this process and print what its parts took."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # no helper imports the compiler again
    parts, spent = dict.fromkeys(PARTS, 0.0), time.process_time()

    def lap(part: str) -> None:
        nonlocal spent
        now = time.process_time()
        parts[part] += now - spent
        spent = now

    import torch

    lap("import torch")
    import poptorch  # noqa: F401
    from poptorch.backends import inductor

    lap("import poptorch")
    import contestants
    from workloads import WORKLOADS, Bert

    small = dataclasses.replace(WORKLOADS["bert"], model=lambda: Bert(2))
    work = small if name == "bert-2" else WORKLOADS[name]
    torch.set_num_threads(1)
    if contestant == "torch.compile":
        contestants.compiled(work)()
    else:
        usual = inductor.compile_graph

        def timed(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> object:
            lap("capture")
            code = usual(module, examples)
            lap("lowering")
            return code

        inductor.compile_graph = timed  # type: ignore[assignment]
        given = contestants.ingredients(work)
        lap("capture")
        inductor.Inductor().warm()
        lap("import compiler")
        step, executor = contestants.ours(work, "optimise", given)
        step()
        assert executor._executable.report().backend == "inductor"
        lap("capture")
        parts["C++"] = _used_by_children()
    print(json.dumps(parts))


def _used_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fresh(name: str, contestant: str, tree: Path) -> dict[str, float]:
    """Measure in a new process for which nothing is cached."""
    with tempfile.TemporaryDirectory(prefix="compile-cost-") as folder:
        environment = {key: value for key, value in os.environ.items() if key not in CACHES}
        environment |= {"TMPDIR": folder, "HOME": folder, "PYTHONPATH": str(tree / "src")}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, __file__, "--inside", contestant, name]
        before = _used_by_children()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        total = _used_by_children() - before
    if done.returncode:
        sys.exit(f"{name}, {contestant}: {done.stderr}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts | {"total": total}


def main() -> None:
    """Print a line per model and contestant, medians of the rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen.names[0], chosen.inside)
        return
    trees = {"here": HERE.parent} | ({"there": chosen.against} if chosen.against else {})
    trees |= {} if chosen.alone else {"torch.compile": HERE.parent}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in chosen.names:
        runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for _ in range(chosen.rounds):
            for tree, path in trees.items():
                runs[tree].append(fresh(name, tree, path))
        figures[name] = {
            tree: {part: statistics.median(run[part] for run in done) for part in done[0]}
            for tree, done in runs.items()
        }
        for tree, parts in figures[name].items():
            shown = ", ".join(f"{part} {parts[part]:.1f}" for part in PARTS if parts[part])
            print(f"{name:7s} {tree:13s} {parts['total']:6.1f} s  {shown}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
