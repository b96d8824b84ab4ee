"""Micro-batches side by side compute what they compute one after another."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import long
from helpers.closeness import FUNCTION, near
from helpers.zoo import ROWS, ZOO
from poptorch._compile import lanes as choosing

ACCUMULATION = 6


def options(lanes: int, replicas: int = 1, backend: str = "reference") -> poptorch.Options:
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False).lanes(lanes)
    opts.replicationFactor(replicas).broadcastBuffers(False).randomSeed(1)
    opts.Training.gradientAccumulation(ACCUMULATION)
    return opts.outputMode(poptorch.OutputMode.All)


def train(model: nn.Module, opts: poptorch.Options, batches) -> tuple[torch.Tensor, dict]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = poptorch.trainingModel(model, opts, optimizer)
    losses = torch.stack([training(*batch)[1] for batch in batches])
    lanes = training.plan().program.lanes
    training.destroy()
    return losses, {**model.state_dict(), "lanes": lanes}


WITH_STATE = ("transformer", "counter", "conv_batchnorm")
WITH_REPLICAS = ("conv_batchnorm", "counter", "dropout")  # which have something of their own


def compare(model: nn.Module, left, right, batches) -> tuple:
    """Train twins of a model; return the lanes of the programs, whose results must be close."""
    expected, state = train(copy.deepcopy(model), left, batches)
    losses, ours = train(model, right, batches)
    lanes = state.pop("lanes"), ours.pop("lanes")
    torch.testing.assert_close(losses, expected, **near(ACCUMULATION * ROWS + FUNCTION, 4))
    torch.testing.assert_close(ours, state, **near(ACCUMULATION * ROWS + FUNCTION, 4))
    return lanes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, lanes, replicas",
    [
        ("transformer", 3, 1),
        *((name, 0, 2) for name in WITH_REPLICAS),
        *(long(name, 3, 1) for name in ZOO if name != "transformer"),
        *(long(name, 0, 2) for name in ZOO if name not in WITH_REPLICAS),
    ],
)
def test_lanes_equal_the_loop(name: str, lanes: int, replicas: int) -> None:
    torch.manual_seed(0)
    batches = [ZOO[name].inputs(ROWS * ACCUMULATION * replicas) for _ in range(2)]
    one_by_one, beside = compare(
        ZOO[name].build(), options(1, replicas), options(lanes * replicas, replicas), batches
    )
    assert one_by_one is None
    assert beside.count == (lanes or ACCUMULATION) * replicas


@pytest.mark.long
@pytest.mark.parametrize(
    "name, lanes", [("linear", 1), *((name, 0) for name in ("embedding", "linear", *WITH_STATE))]
)
def test_compiled_programs_equal_the_interpreted_ones(name: str, lanes: int) -> None:
    torch.manual_seed(0)
    batches = [ZOO[name].inputs(ROWS * ACCUMULATION) for _ in range(3)]
    left, right = compare(
        ZOO[name].build(), options(lanes), options(lanes, backend="inductor"), batches
    )
    assert left == right


@pytest.mark.parametrize("pages", [1 << 30, 300_000])
def test_the_budget_falls_in_halves(pages: int, monkeypatch) -> None:
    """What is free at the moment must not show in what compiled code is kept under."""
    monkeypatch.setattr(choosing, "available_memory", lambda: pages * 4096)
    budget = choosing.default_budget()
    assert budget.bit_count() == 1
    assert budget <= min(choosing.MOST_MEMORY, pages * 4096 // 4)
    assert budget == choosing.MOST_MEMORY or 2 * budget > pages * 4096 // 4


@pytest.mark.slow
def test_a_small_memory_budget_means_more_chunks_and_the_same_result() -> None:
    torch.manual_seed(0)
    batch = ZOO["tied"].inputs(ROWS * ACCUMULATION)
    small = options(0).laneMemory(4000)
    lanes, fewer = compare(ZOO["tied"].build(), options(0), small, [batch])
    assert 1 < fewer.count < lanes.count == ACCUMULATION
