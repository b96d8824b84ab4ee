"""Sweep torch's operators and modules, models of transformers and of graphs through wrapped models.

``python -m sweep operators|modules|models|graphs [--samples N] [names ...]``, run in ``tests``.
Without names it tries everything and writes the rate into ``tests/sweep/RESULTS.md``. With
``--record FILE`` what was tried is kept there and not tried again, so that a long sweep can be made
in pieces, of ``--seconds`` each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from . import known

RESULTS = Path(__file__).with_name("RESULTS.md")
KNOWN = {
    "operators": known.OPERATORS,
    "modules": known.MODULES,
    "models": known.MODELS,
    "graphs": known.GRAPHS,
}
DATABASES = {"operators": ("ops", "operators"), "modules": ("modules", "modules"),
             "models": ("models", "models"), "graphs": ("graphs", "names")}  # fmt: skip


def outcomes(what: str, name: str, most: int) -> Iterator[tuple[str, str | None]]:
    """Yield the outcome of every way that every sample of a name is tried."""
    database = importlib.import_module(f"sweep.{DATABASES[what][0]}")
    for sample in database.samples(name, most):
        yield from database.tried(sample)


def names_of(what: str) -> list[str]:
    """Everything that can be tried."""
    module, function = DATABASES[what]
    return sorted(getattr(importlib.import_module(f"sweep.{module}"), function)())


@dataclass(frozen=True)
class Tried:
    """What became of one name: how often it was tried and failed, and the first failure."""

    tried: int = 0
    failed: int = 0
    problem: str | None = None


def attempt(what: str, name: str, most: int) -> Tried:
    """Try a name in every way."""
    tried, problems = 0, []
    for way, problem in outcomes(what, name, most):
        tried += 1
        if problem:
            problems.append(f"{way}: {problem}")
    return Tried(tried, len(problems), problems[0] if problems else None)


def main() -> int:
    """Sweep; the exit status tells whether something unknown failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DATABASES))
    parser.add_argument("--samples", type=int, default=12, help="at most so many of each")
    parser.add_argument("--record", type=Path, help="go on from this file, and keep it")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known_ones, start = KNOWN[arguments.what], time.time()
    done = _recorded(arguments.record, arguments.what)
    names = arguments.names or names_of(arguments.what)
    for name in (name for name in names if name not in done):
        if time.time() - start > arguments.seconds:
            print(f"{len(done)} of {len(names)} names tried; the same command goes on", flush=True)
            return 0
        found = done[name] = attempt(arguments.what, name, arguments.samples)
        if found.problem:
            mark = "known" if name in known_ones else "NEW"
            print(f"{mark:5} {name}: {found.problem}", flush=True)
        if arguments.record:
            with arguments.record.open("a") as file:
                file.write(json.dumps([arguments.what, name, *astuple(found)]) + "\n")
    done = {name: done[name] for name in names}
    failing = _summed(arguments.what, done, arguments.samples, not arguments.names)
    return 1 if failing - set(known_ones) else 0


def _recorded(file: Path | None, what: str) -> dict[str, Tried]:
    if file is None or not file.exists():
        return {}
    lines = map(json.loads, file.read_text().splitlines())
    return {name: Tried(*rest) for kind, name, *rest in lines if kind == what}


def _summed(what: str, done: dict[str, Tried], most: int, whole: bool) -> set[str]:
    """Print the rate, write that of a whole sweep, and return what failed."""
    tried = sum(found.tried for found in done.values())
    passed = tried - sum(found.failed for found in done.values())
    failing = {name for name, found in done.items() if found.problem}
    rate = f"{passed} of {tried} ({100 * passed / max(tried, 1):.2f} %), at most {most} of each"
    print(f"Samples that pass: {rate}")
    if whole:
        _write(what, rate, failing)
        for name in sorted(set(KNOWN[what]) - failing):
            print(f"can go from known.py: {name}")
    return failing


def _write(what: str, rate: str, failing: set[str]) -> None:
    """Replace one section of the results."""
    reasons = KNOWN[what]
    lines = [f"## {what.capitalize()}", "", f"Samples that pass: {rate}.", ""]
    if failing:
        lines += ["| fails | why |", "|---|---|"]
        lines += [
            f"| `{name}` | {reasons.get(name, 'not looked into')} |" for name in sorted(failing)
        ]
        lines.append("")
    untried = getattr(importlib.import_module(f"sweep.{DATABASES[what][0]}"), "UNTRIED", {})
    if untried:
        lines += ["| not tried | why |", "|---|---|"]
        lines += [f"| `{name}` | {why} |" for name, why in sorted(untried.items())]
        lines.append("")
    text = RESULTS.read_text() if RESULTS.exists() else "# What the sweeps found\n\n"
    text = re.sub(rf"## {what.capitalize()}\n.*?(?=\n## |\Z)", "", text, flags=re.S).rstrip()
    text = re.sub(r"\n{3,}", "\n\n", f"{text}\n\n" + "\n".join(lines))
    RESULTS.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
