"""A seeded sample of the sweeps; ``make sweep`` tries everything."""

from __future__ import annotations

import random
import re

import pytest
import torch

from sweep import checks, known
from sweep.__main__ import RESULTS, names_of, outcomes

FLOORS = {"Operators": 97.0, "Modules": 97.0, "Models": 60.0}


def drawn(what: str, count: int) -> list[str]:
    """The same names on every run."""
    return sorted(random.Random(20).sample(names_of(what), count))


# Operators that need what this library adds, next to those that are drawn.
SPECIAL = [
    "bernoulli", "chunk", "combinations", "corrcoef", "nn.functional.ctc_loss",
    "nn.functional.embedding", "uniform", "unsafe_split",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*drawn("operators", 40), *SPECIAL}))
def test_operators_compute_what_eager_torch_does(name: str) -> None:
    problems = [p for _, p in outcomes("operators", name, 2) if p]
    assert not problems or name in known.OPERATORS, problems[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", drawn("modules", 14))
def test_modules_compute_what_eager_torch_does(name: str) -> None:
    problems = [p for _, p in outcomes("modules", name, 2) if p]
    assert not problems or name in known.MODULES, problems[0]


def test_a_check_that_fails_is_seen() -> None:
    answers = iter([1.0, 2.0, 3.0])
    problem = checks.problem_of(
        lambda: checks.check_inference(lambda x: x * next(answers), [torch.ones(1)])
    )
    assert problem is not None
    assert "not close" in problem


@pytest.mark.parametrize("what", FLOORS)
def test_sweeps_on_record_are_above_the_floor(what: str) -> None:
    (rate,) = re.findall(rf"## {what}\n\nSamples that pass: .*\((.*) %\)", RESULTS.read_text())
    assert float(rate) >= FLOORS[what]


def test_enough_models_are_on_record() -> None:
    (tried,) = re.findall(r"## Models\n\nSamples that pass: \d+ of (\d+)", RESULTS.read_text())
    assert int(tried) == len(names_of("models")) >= 20


def test_every_exception_on_record_has_a_reason() -> None:
    assert "not looked into" not in RESULTS.read_text()
