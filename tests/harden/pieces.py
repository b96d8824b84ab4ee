"""The parts of hard use, cut into pieces that processes can share."""

from __future__ import annotations

import collections
import faulthandler
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

PARTS = {
    "calls": 20_000, "option_sets": 5_000, "saved_files": 1_000, "cache_entries": 1_000,
    "races": 200, "signals": 200, "kills": 100, "jobs": 50, "orders": 2_000,
}  # fmt: skip
PIECES = 20  # of each part
APART = 50_000  # numbers of trials between two pieces
HANGS = 300  # seconds that one trial may take


def piece(name: str, number: int, count: int) -> dict[str, Any]:
    """Make trials from one number on, until there are so many outcomes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    module = importlib.import_module(f"harden.{name}")
    outcomes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    while outcomes.total() < count:
        faulthandler.dump_traceback_later(HANGS, exit=True)  # which ends the run
        for outcome, problem in module.trial(number):
            outcomes["defect" if problem else outcome] += 1
            if problem:
                problems.append(f"trial {number}, {outcome}: {problem}")
        number += 1
    faulthandler.cancel_dump_traceback_later()
    return {"outcomes": outcomes, "problems": problems}


def pieces(parts: list[str], scale: float, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield part, first trial and count of each piece."""
    for name in parts:
        count = max(1, round(PARTS[name] * scale))
        number = min(PIECES, count)
        for at in range(number):
            first = seed * 1_000_000 + at * APART
            yield name, first, count // number + (at < count % number)
