"""A seeded sample of the sweeps; ``make sweep`` tries everything."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.cases import few
from sweep import checks, known
from sweep.__main__ import names_of, outcomes

pytestmark = pytest.mark.slow  # to import torch's own lists takes seconds


def drawn(what: str, count: int) -> list[str]:
    """The same names on every run."""
    return sorted(random.Random(20).sample(names_of(what), count))


# Operators that need what this library adds, next to those that are drawn.
SPECIAL = [
    "bernoulli", "chunk", "combinations", "corrcoef", "nn.functional.ctc_loss",
    "nn.functional.embedding", "uniform", "unsafe_split",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(sorted({*drawn("operators", 40), *SPECIAL}), *SPECIAL))
def test_operators_compute_what_eager_torch_does(name: str) -> None:
    problems = [p for _, p in outcomes("operators", name, 2) if p]
    assert not problems or name in known.OPERATORS, problems[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(drawn("modules", 14), *drawn("modules", 14)[:4]))
def test_modules_compute_what_eager_torch_does(name: str) -> None:
    problems = [p for _, p in outcomes("modules", name, 2) if p]
    assert not problems or name in known.MODULES, problems[0]


# What is gone from a list of edges, of nodes, of groups: a layer of each kind.
GRAPHS = ["GATConv", "HeteroBatchNorm", "LSTMAggregation", "MaskLabel", "RGCNConv", "TopKPooling"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(GRAPHS, "GATConv", "TopKPooling"))
def test_graph_layers_train_as_in_eager_torch(name: str) -> None:
    pytest.importorskip("torch_geometric")
    assert [p for _, p in outcomes("graphs", name, 1) if p] == []


def test_a_check_that_fails_is_seen() -> None:
    answers = iter([1.0, 2.0, 3.0])
    problem = checks.problem_of(
        lambda: checks.check_inference(lambda x: x * next(answers), [torch.ones(1)])
    )
    assert problem is not None
    assert "not close" in problem


@pytest.mark.parametrize(
    "what, names",
    [
        ("operators", known.OPERATORS),
        ("modules", known.MODULES),
        ("models", known.MODELS),
        ("graphs", known.GRAPHS),
    ],
)
def test_every_known_exception_is_something_that_is_tried(what: str, names: dict[str, str]) -> None:
    if what == "graphs":
        pytest.importorskip("torch_geometric")
    assert set(names) <= set(names_of(what))
    assert all(names.values())
