"""Measure kinds of programs that are rare in benchmarks: unrolled, deep, differentiated twice, or
with sizes that vary.

Every figure is processor time on one thread, which neighbours disturb least. "First" is the
processor time from wrapping to the first optimised step, in its own process with an empty cache;
the C++ compiler counts. Steps of all contestants then alternate in one process. If a contestant
refuses a program, its cells contain the reason.

The row "sizes" trains the model of ``varying_sizes.py``, which measures more about it.

Usage: python benchmarks/program_kinds.py [ROW ...] [--rounds N] [--out RESULTS.md]

With ``--out``, the section of the results is added to this file, or replaced there. The plots of
the Speed page are drawn from it when the site is built.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import contestants
import varying_sizes
from workloads import WORKLOADS, Bert, Workload

HEADING = "Kinds of programs"
Step = Callable[[], object]


class Unrolled(nn.Module):
    """A cell that a Python loop calls for every step of a series, with its loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, width), nn.Linear(width, 10)
        self.width = width

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = x.new_zeros(len(x), self.width)
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        scores = self.head(state)
        return scores, F.cross_entropy(scores, y)


class Forces(nn.Module):
    """Forces are gradients of an energy, and the loss is that of the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1))
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.requires_grad_()
            (gradient,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return -gradient, F.mse_loss(-gradient, y)


def series(steps: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return series of a number of steps, and their classes."""
    return torch.randn(rows, steps, 16), torch.randint(0, 10, (rows,))


def positions(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions, and the forces there."""
    return torch.randn(rows, 32), torch.randn(rows, 32)


UNROLLED, LAYERS = (16, 64, 256), (2, 4, 8, 12)
SIZES, LENGTHS = "sizes", 12
ROWS: dict[str, Workload] = {
    **{
        f"unrolled-{steps}": Workload(
            f"cell, {steps} unrolled steps", Unrolled, functools.partial(series, steps), 8, "Adam"
        )
        for steps in UNROLLED
    },
    **{
        f"layers-{count}": Workload(
            f"BERT, {count} layers",
            functools.partial(Bert, count),
            WORKLOADS["bert"].data,
            2,
            "Adam",
        )
        for count in LAYERS
    },
    "twice": Workload("forces, differentiated twice", Forces, positions, 64, "Adam"),
    "muon": WORKLOADS["bert-muon"],
    "adafactor": WORKLOADS["bert-adafactor"],
}
TITLES = {name: work.title for name, work in ROWS.items()} | {SIZES: f"BERT, {LENGTHS} lengths"}
MAKE: dict[str, Callable[[Workload], Any]] = {
    "eager": contestants.eager,
    "torch.compile": contestants.compiled,
    "poptorch": lambda work: contestants.ours(work, "optimise")[0],
}


def stepping(name: str, contestant: str) -> Step:
    """Return a contestant's step. With sizes that vary, a step is one update for each length."""
    if name != SIZES:
        step: Step = MAKE[contestant](ROWS[name])
        return step
    torch.manual_seed(0)
    model = varying_sizes.Bert(2)
    if contestant == "poptorch":
        update = varying_sizes.ours(model)
    else:
        compiling = contestant == "torch.compile"
        update = varying_sizes.plain(model, torch.compile(model) if compiling else model)
    batches = [varying_sizes.batch(length) for length in varying_sizes.lengths(LENGTHS)]
    return lambda: [update(*batch) for batch in batches]


def first(name: str, contestant: str) -> dict[str, Any]:
    """Return the processor seconds from wrapping to the first optimised step."""
    before = time.process_time()
    try:
        stepping(name, contestant)()
    except Exception as error:  # whatever a contestant raises is its result
        return {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": time.process_time() - before + used.ru_utime + used.ru_stime}


def alternately(name: str, rounds: int) -> dict[str, float]:
    """Return the median processor seconds of a step, by contestant that does not refuse it."""
    steps, times = {}, dict[str, list[float]]()
    for contestant in MAKE:
        try:
            step = stepping(name, contestant)
            for _ in range(3):
                step()
        except Exception as error:
            print(f"  {contestant} refuses {name}: {type(error).__name__}", flush=True)
            continue
        steps[contestant], times[contestant] = step, []
    order, draw = list(steps.items()), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for contestant, step in order:
            start = time.process_time()
            step()
            times[contestant].append(time.process_time() - start)
    return {contestant: statistics.median(spent) for contestant, spent in times.items()}


def child(*arguments: str) -> Any:
    """Measure in a new process with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="kinds-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # so that all processes end with this one
        }  # fmt: skip
        command = [sys.executable, __file__, "--inside", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [text for text in done.stdout.splitlines() if text.startswith("FIGURES ")]
    if not found:
        raise SystemExit(f"{' '.join(arguments)}: failed\n{done.stderr[-3000:]}")
    return json.loads(found[-1].removeprefix("FIGURES "))


def inside(name: str, what: str, rounds: str) -> None:
    """Print what one process measures."""
    torch.set_num_threads(1)
    figures = alternately(name, int(rounds)) if what == "steps" else first(name, what)
    print("FIGURES " + json.dumps(figures))


def row(name: str, rounds: int) -> list[str]:
    """Measure a row, and return its cells."""
    starts = {each: child(name, each, "0") for each in ("torch.compile", "poptorch")}
    steps = child(name, "steps", str(rounds))
    cells = [TITLES[name]]
    for start in starts.values():
        cells.append(f"{start['seconds']:.1f}" if "seconds" in start else "refused")
    cells += [f"{steps[each] * 1e3:.2f}" if each in steps else "refused" for each in MAKE]
    own = steps["poptorch"]
    others = ("eager", "torch.compile")
    cells += [f"{steps[each] / own:.2f}" if each in steps else "" for each in others]
    for contestant, start in starts.items():
        if "refused" in start:
            print(f"  {contestant} refuses {name}: {start['refused']}", flush=True)
    return cells


HEAD = (
    "program", "torch.compile, first", "poptorch, first", "eager", "torch.compile", "poptorch",
    "vs eager", "vs torch.compile",
)  # fmt: skip


def section(rows: list[list[str]], rounds: int) -> str:
    """Return the section of the results."""
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]
    return (
        f"## {HEADING}\n\n`benchmarks/program_kinds.py --rounds {rounds}`: processor time on one "
        "thread. First: seconds from wrapping to the first optimised step, with an empty cache. "
        "The rest: milliseconds of a step, medians of alternating runs in one process, and the "
        "other's time divided by ours.\n\n" + "\n".join(lines) + "\n"
    )


def add(text: str, path: Path) -> None:
    """Add a section to the results, or replace it there."""
    before = path.read_text() if path.exists() else ""
    found = re.search(rf"^## {HEADING}\n.*?(?=^## |\Z)", before, re.M | re.S)
    after = before.replace(found[0], f"{text}\n") if found else f"{before.rstrip()}\n\n{text}"
    path.write_text(after.rstrip() + "\n")


def main() -> None:
    """Print the section, and add it to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(TITLES)}")
    parser.add_argument(
        "--rounds", type=int, default=31, help="steps of each contestant (default: 31)"
    )
    parser.add_argument("--out", type=Path, help="results to which the section is added")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(*chosen.inside)
        return
    rows = []
    for name in chosen.rows or TITLES:
        rows.append(row(name, chosen.rounds))
        print(" | ".join(rows[-1]), flush=True)
    text = section(rows, chosen.rounds)
    print(f"\n{text}")
    if chosen.out:
        add(text, chosen.out)


if __name__ == "__main__":
    main()
