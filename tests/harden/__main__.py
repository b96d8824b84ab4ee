"""Hard use, seeded: ``python -m harden [part ...] [--scale SHARE] [--seed N]``, run in ``tests``.

Each part makes so many trials and prints how they went; ``--jobs`` processes share them, in pieces.
With ``--done FILE`` finished pieces are noted there, and those that it has are not made again. A
whole run of everything is written into ``tests/harden/RESULTS.md``. The exit status tells whether
anything was undocumented, wrong afterwards, left over, or hung.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harden.pieces import PARTS, piece, pieces

RESULTS = Path(__file__).with_name("RESULTS.md")
SHOWN = 20
TITLE, EARLIER = "# What hard use found", "## Earlier runs"


def run(todo: list[tuple[str, int, int]], jobs: int, done: Path | None) -> dict[str, Any]:
    """Make pieces, or read what is known of them; return by name what came of each."""
    known = {}
    if done is not None and done.exists():
        known = dict(json.loads(line) for line in done.read_text().splitlines())
    results = {text: known[text] for text in map(str, todo) if text in known}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool:
        waiting = {pool.submit(piece, *each): str(each) for each in todo if str(each) not in known}
        for future in concurrent.futures.as_completed(waiting):
            text, result = waiting[future], future.result()
            results[text] = result
            print(text, *result["problems"], sep="\n  ", flush=True)
            if done is not None:
                with done.open("a") as file:
                    file.write(json.dumps([text, result]) + "\n")
    return results


def summary(name: str, results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a part."""
    outcomes = sum(
        (collections.Counter(each["outcomes"]) for each in results), collections.Counter()
    )
    problems = [problem for each in results for problem in each["problems"]]
    counts = ", ".join(f"{number} {what}" for what, number in outcomes.most_common())
    line = f"- {name}: {outcomes.total()} tried: {counts}"
    return [line, *(f"  - {problem}" for problem in problems[:SHOWN])]


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--done", type=Path, help="file of finished pieces")
    chosen = parser.parse_args()
    names = chosen.parts or list(PARTS)
    todo = list(pieces(names, chosen.scale, chosen.seed))
    start = time.time()
    results = run(todo, chosen.jobs, chosen.done)
    lines = [line for name in names for line in
             summary(name, [results[str(each)] for each in todo if each[0] == name])]  # fmt: skip
    defects = sum(len(each["problems"]) for each in results.values())
    seconds = time.time() - start
    print(*lines, f"{defects} defects, {seconds:.0f} s of {chosen.jobs} processes", sep="\n")
    if not chosen.parts:
        told = (
            f"{time.strftime('%Y-%m-%d')}, `make harden`, {chosen.scale:.2g} of the trials, seed "
            f"{chosen.seed}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{seconds:.0f} s of {chosen.jobs} processes: {defects} defects."
        )
        RESULTS.write_text(page(told, lines, RESULTS.read_text()))
    return 1 if defects else 0


def page(told: str, lines: list[str], before: str) -> str:
    """Return the text of a run's results, which keeps the line of each run before it.

    Args:
        told: the run's line.
        lines: what it found.
        before: the text until now.
    """
    last, _, earlier = before.removeprefix(f"{TITLE}\n\n").partition(f"\n{EARLIER}\n\n")
    known = [f"- {last.partition(chr(10))[0]}", *earlier.splitlines()]
    return "\n".join([TITLE, "", told, "", *lines, "", EARLIER, "", *known, ""])


if __name__ == "__main__":
    sys.exit(main())
