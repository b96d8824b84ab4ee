"""Torch's operators and modules, models of transformers and of graphs, through wrapped models.

``make test`` has a few of each; ``make test-long`` has all that torch and torch_geometric list.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cases import few
from sweep import checks, known, models, modules, ops

graphs: Any = pytest.importorskip("sweep.graphs", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Operators that need what this library adds, and a few that are drawn.
OPERATORS = [
    "bernoulli", "chunk", "combinations", "corrcoef", "nn.functional.ctc_loss",
    "nn.functional.embedding", "uniform", "unsafe_split", "cumsum", "index_add", "masked_scatter",
    "nn.functional.batch_norm", "scatter_reduce.amax", "svd_lowrank",
]  # fmt: skip
MODULES = ["AdaptiveMaxPool2d", "CTCLoss", "GRU", "MultiheadAttention"]
# What is gone from a list of edges, of nodes, of groups: a layer of each kind.
GRAPHS = ["GATConv", "HeteroBatchNorm", "TopKPooling"]


def problems(database: Any, name: str, most: int) -> list[str]:
    """Return what went wrong with samples of a name, in the ways that they are tried."""
    samples = database.samples(name, most)
    tried = [(way, each) for sample in samples for way, each in database.tried(sample)]
    return [f"{way}: {problem}" for way, problem in tried if problem]


@pytest.mark.parametrize("name", few(sorted(ops.operators()), *OPERATORS))
def test_operators_compute_what_eager_torch_does(name: str) -> None:
    assert name in known.OPERATORS or problems(ops, name, 4) == []


@pytest.mark.parametrize("name", few(sorted(modules.modules()), *(f"nn.{n}" for n in MODULES)))
def test_modules_compute_what_eager_torch_does(name: str) -> None:
    assert problems(modules, name, 4) == []


@pytest.mark.parametrize("name", few(sorted(models.models())))
def test_models_train_as_in_eager_torch(name: str) -> None:
    assert name in known.MODELS or problems(models, name, 1) == []


@pytest.mark.parametrize("name", few(sorted(graphs.names()), *GRAPHS))
def test_graph_layers_train_as_in_eager_torch(name: str) -> None:
    assert name in known.GRAPHS or problems(graphs, name, 1) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "database, names", [(ops, known.OPERATORS), (models, known.MODELS), (graphs, known.GRAPHS)]
)
def test_what_is_known_to_fail_fails(database: Any, names: dict[str, str]) -> None:
    assert [name for name in names if not problems(database, name, 12)] == []


def test_a_check_that_fails_is_seen() -> None:
    answers = iter([1.0, 2.0, 3.0])
    problem = checks.problem_of(
        lambda: checks.check_inference(lambda x: x * next(answers), [torch.ones(1)])
    )
    assert problem is not None
    assert "not close" in problem
