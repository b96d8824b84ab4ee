"""A short, seeded part of ``make harden``."""

from __future__ import annotations

import importlib

import pytest

from harden.pieces import PARTS

FEW = {
    "calls": 8, "option_sets": 40, "saved_files": 20, "cache_entries": 15, "races": 2,
    "signals": 1, "kills": 2, "jobs": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARTS)
def test_hard_use_finds_nothing(name: str) -> None:
    module = importlib.import_module(f"harden.{name}")
    outcomes = [outcome for number in range(1, 1 + FEW[name]) for outcome in module.trial(number)]
    assert outcomes
    assert not [problem for _, problem in outcomes if problem]


def test_a_defect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from harden import calls

    monkeypatch.setattr(calls, "close", lambda got, expected: False)
    problems = [p for number in range(3) for _, p in calls.trial(number) if p]
    assert problems
    assert all("other numbers than eager" in problem for problem in problems)
