"""Sweep torch's operators and modules, and models of transformers, through wrapped models.

``python -m sweep operators|modules|models [--samples N] [names ...]``, run in ``tests``. Without
names it tries everything and writes the rate into ``tests/sweep/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import known

RESULTS = Path(__file__).with_name("RESULTS.md")
KNOWN = {"operators": known.OPERATORS, "modules": known.MODULES, "models": known.MODELS}
DATABASES = {"operators": ("ops", "operators"), "modules": ("modules", "modules"),
             "models": ("models", "models")}  # fmt: skip


def outcomes(what: str, name: str, most: int) -> Iterator[tuple[str, str | None]]:
    """Yield the outcome of every way that every sample of a name is tried."""
    database = importlib.import_module(f"sweep.{DATABASES[what][0]}")
    for sample in database.samples(name, most):
        yield from database.tried(sample)


def names_of(what: str) -> list[str]:
    """Everything that can be tried."""
    module, function = DATABASES[what]
    return sorted(getattr(importlib.import_module(f"sweep.{module}"), function)())


def main() -> int:
    """Sweep; the exit status tells whether something unknown failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DATABASES))
    parser.add_argument("--samples", type=int, default=6, help="at most so many of each")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = failed = 0
    failing: dict[str, str] = {}
    start = time.time()
    for name in arguments.names or names_of(arguments.what):
        for way, problem in outcomes(arguments.what, name, arguments.samples):
            tried += 1
            if problem:
                failed += 1
                failing.setdefault(name, f"{way}: {problem}")
        if name in failing:
            mark = "known" if name in KNOWN[arguments.what] else "NEW"
            print(f"{mark:5} {name}: {failing[name]}", flush=True)
    rate = 100 * (1 - failed / max(tried, 1))
    print(f"{tried - failed} of {tried} samples pass: {rate:.2f} % in {time.time() - start:.0f} s")
    if not arguments.names:
        _write(arguments.what, f"{tried - failed} of {tried} ({rate:.2f} %)", failing)
        for name in sorted(set(KNOWN[arguments.what]) - set(failing)):
            print(f"can go from known.py: {name}")
    return 1 if set(failing) - set(KNOWN[arguments.what]) else 0


def _write(what: str, rate: str, failing: dict[str, str]) -> None:
    """Replace one section of the results."""
    reasons = KNOWN[what]
    lines = [f"## {what.capitalize()}", "", f"Samples that pass: {rate}.", ""]
    if failing:
        lines += ["| fails | why |", "|---|---|"]
        lines += [
            f"| `{name}` | {reasons.get(name, 'not looked into')} |" for name in sorted(failing)
        ]
        lines.append("")
    text = RESULTS.read_text() if RESULTS.exists() else "# What the sweeps found\n\n"
    text = re.sub(rf"## {what.capitalize()}\n.*?(?=\n## |\Z)", "", text, flags=re.S).rstrip()
    RESULTS.write_text(f"{text}\n\n" + "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
