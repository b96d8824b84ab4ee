"""A short, seeded part of ``make harden``."""

from __future__ import annotations

import importlib

import pytest
import torch

from helpers.cases import long

FEW = {
    "calls": 8, "option_sets": 40, "saved_files": 20, "cache_entries": 15, "races": 2, "orders": 5,
}  # fmt: skip
MORE = {"signals": 1, "kills": 2, "jobs": 1, "orders": 100}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "count"), [*FEW.items(), *(long(name, count) for name, count in MORE.items())]
)
def test_hard_use_finds_nothing(name: str, count: int) -> None:
    module = importlib.import_module(f"harden.{name}")
    outcomes = [each for number in range(1, count + 1) for each in module.trial(number)]
    assert outcomes
    assert not [problem for _, problem in outcomes if problem]


@pytest.mark.parametrize("where", ["results", "weights"])
def test_a_defect_is_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from harden import calls, models

    native = models.Subject.native

    def others(self, args, kwargs, twin=None):
        result = native(self, args, kwargs, twin)
        if where == "weights":
            with torch.no_grad():
                next((twin or self.eager).parameters(), torch.zeros(1)).mul_(1.001)
            return result
        scaled = {key: t * 1.001 for key, t in result.items()} if isinstance(result, dict) else ()
        return scaled or result * 1.001

    monkeypatch.setattr(models.Subject, "native", others)
    problems = [p for number in range(3) for _, p in calls.trial(number) if p]
    assert problems
    assert all("other numbers than eager" in problem for problem in problems)


def test_what_rounding_decides_is_counted_apart() -> None:
    from harden import calls

    outcomes = list(calls.trial(19250052))  # odd batches take its weights to 1e28
    assert not [problem for _, problem in outcomes if problem]
    assert [outcome for outcome, _ in outcomes if outcome.startswith("diverged")]


def test_results_keep_a_line_of_each_earlier_run() -> None:
    from harden.__main__ import EARLIER, RESULTS, TITLE, page

    written = RESULTS.read_text()
    first = page("one.", ["- calls: 1 tried"], written)
    second = page("two.", ["- calls: 2 tried"], first)
    head, _, earlier = second.partition(EARLIER)
    assert head == f"{TITLE}\n\ntwo.\n\n- calls: 2 tried\n\n"
    lines = written.splitlines()
    kept = ["- one.", f"- {lines[2]}", *lines[lines.index(EARLIER) + 2 :]]
    assert earlier.strip().splitlines() == kept
