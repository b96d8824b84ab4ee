"""Torch's operators and modules, models of transformers and of graphs, through wrapped models.

``make test`` has a few of each; ``make test-long`` has all that torch and torch_geometric list.
"""

import importlib

import pytest
import torch

from helpers.wrapping import Calling
from sweep import checks, known

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Operators that need what this library adds, and others; then modules, and layers from whose lists
# of edges, of nodes, of groups something is gone.
FEW = {
    "ops": [
        "bernoulli",
        "chunk",
        "combinations",
        "corrcoef",
        "nn.functional.ctc_loss",
        "nn.functional.embedding",
        "uniform",
        "unsafe_split",
        "cumsum",
        "index_add",
        "masked_scatter",
        "nn.functional.batch_norm",
        "scatter_reduce.amax",
        "svd_lowrank",
    ],
    "modules": ["nn.AdaptiveMaxPool2d", "nn.CTCLoss", "nn.GRU", "nn.MultiheadAttention"],
    "graphs": ["GATConv", "HeteroBatchNorm", "TopKPooling"],
}
KNOWN = {"ops": known.OPERATORS, "modules": {}, "models": {}, "graphs": known.GRAPHS}
PARTS = 12  # of all names


def problems(what: str, name: str, most: int = 4) -> list[str]:
    """Return what went wrong with samples of a name, in the ways that they are tried."""
    database = importlib.import_module(f"sweep.{what}")
    samples = database.samples(name, most)
    tried = [(way, each) for sample in samples for way, each in database.tried(sample)]
    return [f"{way}: {problem}" for way, problem in tried if problem]


@pytest.mark.parametrize("what, name", [(what, name) for what in FEW for name in FEW[what]])
def test_some_operators_compute_the_same_as_eager_torch(what: str, name: str) -> None:
    assert problems(what, name, 2) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("what", KNOWN)
def test_every_operator_computes_the_same_as_eager_torch(what: str, part: int) -> None:
    names = sorted(importlib.import_module(f"sweep.{what}").names())[part::PARTS]
    new = [name for name in names if name not in KNOWN[what]]
    assert {name: found for name in new if (found := problems(what, name))} == {}


@pytest.mark.long
@pytest.mark.parametrize("what", ["ops", "graphs"])
def test_cases_that_are_known_to_fail_fail(what: str) -> None:
    assert [name for name in KNOWN[what] if not problems(what, name, 12)] == []


def test_a_failing_check_is_reported() -> None:
    answers = iter([1.0, 2.0, 3.0])
    problem = checks.problem_of(
        lambda: checks.check_inference(Calling(lambda x: x * next(answers)), ((torch.ones(1),), {}))
    )
    assert problem is not None
    assert "does not agree with eager PyTorch" in problem
