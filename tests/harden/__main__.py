"""Hard use, seeded: ``python -m harden [part ...] [--scale SHARE] [--seed N]``, run in ``tests``.

Each part makes so many trials and prints how they went. A whole run of everything is written into
``tests/harden/RESULTS.md``. The exit status tells whether anything was undocumented, wrong
afterwards, left over, or hung.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import importlib
import logging
import platform
import sys
import time
import warnings
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")
PARTS = {
    "calls": 20_000, "option_sets": 5_000, "saved_files": 1_000, "cache_entries": 1_000,
    "races": 200, "signals": 200, "kills": 100,
}  # fmt: skip
HANGS = 300  # seconds that one trial may take
SHOWN = 20


class Part:
    """What became of the trials of one part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def run(self, count: int, seed: int) -> None:
        """Make trials until there are so many outcomes."""
        module = importlib.import_module(f"harden.{self.name}")
        number = seed * 1_000_000
        while self.outcomes.total() < count:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            for outcome, problem in module.trial(number):
                self.outcomes["defect" if problem else outcome] += 1
                if problem:
                    self.problems.append(f"trial {number}, {outcome}: {problem}")
                    print(f"  {self.problems[-1]}", flush=True)
            number += 1
        faulthandler.cancel_dump_traceback_later()

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {what}" for what, number in self.outcomes.most_common())
        return f"{self.name}: {self.outcomes.total()} tried: {counts}"


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--seed", type=int, default=19)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    lines, defects, start = [], 0, time.time()
    for name in chosen.parts or PARTS:
        part = Part(name)
        part.run(max(1, round(PARTS[name] * chosen.scale)), chosen.seed)
        print(part, flush=True)
        lines += [f"- {part}", *(f"  - {problem}" for problem in part.problems[:SHOWN])]
        defects += len(part.problems)
    print(f"{defects} defects, {time.time() - start:.0f} s")
    if not chosen.parts:
        head = f"# What hard use found\n\n`make harden`, {chosen.scale:.2g} of the trials, seed "
        head += f"{chosen.seed}, torch {torch.__version__}, Python {platform.python_version()}, "
        head += f"{time.time() - start:.0f} s: {defects} defects.\n\n"
        RESULTS.write_text(head + "\n".join(lines) + "\n")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
