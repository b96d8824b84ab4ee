"""Measure the cost of compilation, part by part, from nothing to the first optimised step.

The default measures processor seconds. Each figure comes from its own process on one core, with
empty cache and temporary folders. All child processes count until the step is done. On a shared
machine, only ratios of neighbouring runs are meaningful. Therefore ``--against`` measures another
source tree alternately with this one, and ``torch.compile`` is measured next to them.

``--counts`` measures counts instead, which hardly vary: imported modules, calls of Python
functions, and, for the C++ compiler, the bytes of its sources including all headers. A test
compares these counts with ``results/compile-counts.json``.

Usage: python benchmarks/compile_cost.py [NAME ...] [--against TREE] [--rounds N] [--json FILE]
       python benchmarks/compile_cost.py [NAME ...] --counts [--json FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COUNTS = HERE / "results" / "compile-counts.json"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "POPTORCH_CACHE_DIR", "POPART_CACHE_DIR", "TRITON_CACHE_DIR")
LEFT_OUT = (*CACHES, "PYTHONDONTWRITEBYTECODE")  # an installed package comes with its byte code
NAMES = ("mlp", "cnn", "bert-2", "bert-12", "lstm", "resnet")
OURS = ("import poptorch", "import compiler", "capture", "lowering", "C++")
PARTS = ("import torch", "model", *OURS)


class Counted(BaseException):
    """Raised when everything is counted, so that the C++ compiler need not run."""


class Laps:
    """Divides the growth of a measure into parts."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.read_by(read)

    def read_by(self, read: Callable[[], float]) -> None:
        """Continue with another measure."""
        self._read, self._before = read, read()

    def lap(self, part: str) -> None:
        """Count the growth since the last call as one part."""
        now = self._read()
        self.parts[part] += now - self._before
        self._before = now


class Calls:
    """Counts the Python functions that return while it is active."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile(builtins=False)
        self.enable, self.disable = self._profile.enable, self._profile.disable

    def __call__(self) -> float:
        return float(sum(entry.callcount for entry in self._profile.getstats()))


def modules() -> float:
    """Return the number of imported modules."""
    return float(len(sys.modules))


def inside(name: str, contestant: str) -> None:
    """Run one step in this process, and print the cost of its parts."""
    # on one core, no helper process imports the compiler again
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    counting = contestant == "counts"
    laps = Laps(modules if counting else time.process_time)
    import torch

    laps.lap("import torch")
    import poptorch  # noqa: F401

    laps.lap("import poptorch")
    import contestants
    from workloads import WORKLOADS, Bert

    kind, _, layers = name.partition("-")
    work = WORKLOADS[kind]
    if layers:
        work = dataclasses.replace(work, model=lambda: Bert(int(layers)))
    torch.set_num_threads(1)
    if contestant == "torch.compile":
        contestants.compiled(work)()
    else:
        given = contestants.ingredients(work)
        laps.lap("model")  # torch's optimizers import half of its compiler
        watch(laps, Calls() if counting else None)
        step, executor = contestants.ours(work, "optimise", given)
        try:
            step()
            assert executor._executable.report().backend == "inductor"
            laps.lap("capture")
        except Counted:
            pass
    if not counting:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        laps.parts["C++"] = used.ru_utime + used.ru_stime
        laps.parts["total"] = time.process_time() + laps.parts["C++"]
    print(json.dumps(laps.parts | {"conditions": conditions() if counting else None}))


def watch(laps: Laps, calls: Calls | None) -> None:
    """Record when a first call starts to import the compiler, to lower, and to run g++."""
    from poptorch._cpu import backend as cpu

    usual, build = cpu.compile_graph, cpu.Inductor.build

    def building(self: Any, graph: Any) -> Any:
        laps.lap("capture")
        if calls is not None:
            calls.disable()
            laps.read_by(modules)
        self.warm()
        laps.lap("import compiler")
        if calls is not None:
            laps.read_by(calls)
            calls.enable()
        return build(self, graph)

    def lowering(*arguments: Any) -> Any:
        if calls is not None:
            from torch._inductor.cpp_builder import CppBuilder

            CppBuilder.build = reading  # type: ignore[method-assign]
        laps.lap("capture")
        code = usual(*arguments)
        laps.lap("lowering")
        return code

    def reading(builder: Any) -> None:
        command = shlex.split(builder.get_command_line())
        at = command.index("-o")
        if command[1].endswith(".cpp"):
            only_read = [*command[:at], *command[at + 2 :], "-E", "-P", "-w"]
            read = subprocess.run(only_read, capture_output=True, check=True)
            laps.parts["C++"] += len(read.stdout)
        if not builder._do_link:
            Path(command[at + 1]).touch()
            return
        laps.lap("lowering")
        raise Counted

    cpu.Inductor.build = building  # type: ignore[method-assign]
    cpu.compile_graph = lowering
    if calls is not None:
        laps.read_by(calls)
        calls.enable()


def environment_in(folder: str, tree: Path) -> dict[str, str]:
    """Return an environment in which all caches are in one folder, for one thread."""
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    environment |= {"TMPDIR": folder, "HOME": folder, "PYTHONPATH": str(tree / "src")}
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def fresh(name: str, contestant: str, tree: Path) -> dict[str, Any]:
    """Measure in a new process without any cached files."""
    with tempfile.TemporaryDirectory(prefix="compile-cost-") as folder:
        command = [sys.executable, __file__, "--inside", contestant, name]
        environment = environment_in(folder, tree)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {contestant}: {done.stderr}")
    parts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parts


def conditions() -> dict[str, str]:
    """Return the conditions that counts depend on."""
    import torch

    compiler = os.environ.get("CXX") or "g++"
    version = subprocess.run(
        [compiler, "-dumpfullversion"], capture_output=True, text=True, check=True
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "C++ compiler": f"{compiler} {version.stdout.strip()}",
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def counted(names: list[str]) -> dict[str, Any]:
    """Return the counts of each model, measured in separate processes, and the conditions."""
    counts = {}
    for name in names:
        parts = fresh(name, "counts", HERE.parent)
        counts[name] = {part: round(parts[part]) for part in OURS}
        print(f"{name:7s} {counts[name]}", flush=True)
    return {"conditions": parts["conditions"], "counts": counts}


def timed(names: list[str], trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Return median seconds, and print a line for each model and contestant."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for _ in range(rounds):
            for tree, path in trees.items():
                runs[tree].append(fresh(name, tree, path))
        figures[name] = {
            tree: {part: statistics.median(run[part] for run in done) for part in (*PARTS, "total")}
            for tree, done in runs.items()
        }
        for tree, parts in figures[name].items():
            shown = ", ".join(f"{part} {parts[part]:.1f}" for part in PARTS if parts[part])
            print(f"{name:7s} {tree:13s} {parts['total']:6.1f} s  {shown}", flush=True)
    return figures


def main() -> None:
    """Print medians of the rounds, or counts: a line for each model and contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=NAMES, metavar="NAME", help="models to compile (default: all)"
    )
    parser.add_argument("--against", type=Path, help="another source tree, measured alternately")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of each figure (default: 1)"
    )
    parser.add_argument("--alone", action="store_true", help="without torch.compile")
    parser.add_argument("--counts", action="store_true", help="calls and bytes instead of seconds")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen.names[0], chosen.inside)
        return
    trees = {"here": HERE.parent} | ({"there": chosen.against} if chosen.against else {})
    trees |= {} if chosen.alone else {"torch.compile": HERE.parent}
    names = list(chosen.names)
    figures = counted(names) if chosen.counts else timed(names, trees, chosen.rounds)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
