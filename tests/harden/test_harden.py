"""Hard use by strangers, seeded: odd calls, damaged files, signals, kills, any order.

``make test`` makes a few trials of each part that starts no processes, ``make test-long`` many.
"""

import collections
import importlib
from typing import Any

import pytest
import torch

from helpers.cases import long

FEW = {
    "calls": 8,
    "option_sets": 40,
    "saved_files": 20,
    "orders": 25,
    "modules": 24,
    "checkpoint_kills": 5,
}
MANY = {
    "calls": 1000,
    "option_sets": 5000,
    "saved_files": 1000,
    "signals": 20,
    "jobs": 80,
    "orders": 2000,
    "modules": 2000,
    "exports": 500,
    "checkpoint_kills": 100,
}
PIECES = 10  # of the many of each part
CASES = [*((name, 1, count) for name, count in FEW.items())]
CASES += [("orders", first, 25) for first in (26, 51, 76)]
CASES += [("exports", 371, 12)]  # among them three that were no Python, or failed
CASES += [
    long(name, first, count // PIECES)
    for name, count in MANY.items()
    for first in range(1000, 1000 + count, count // PIECES)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "first", "count"), CASES)
def test_hard_use_finds_nothing(name: str, first: int, count: int) -> None:
    module = importlib.import_module(f"harden.{name}")
    outcomes = [(at, *each) for at in range(first, first + count) for each in module.trial(at)]
    print(collections.Counter(outcome for _, outcome, _ in outcomes))
    assert outcomes
    assert [each for each in outcomes if each[2]] == []


def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from harden import calls, models

    native = models.Subject.native

    def others(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return torch.utils._pytree.tree_map(lambda t: t * 1.001, native(self, args, kwargs))

    monkeypatch.setattr(models.Subject, "native", others)
    problems = [p for number in range(3) for _, p in calls.trial(number) if p]
    assert problems
    assert all("other numbers than eager" in problem for problem in problems)
