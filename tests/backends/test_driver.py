"""What the runs of a program get and return, one after the other and side by side."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, options

X = torch.tensor([[1.0], [2.0], [3.0], [4.0]])


ONE_AFTER_THE_OTHER, SIDE_BY_SIDE = 1, 4
each_number_of_lanes = pytest.mark.parametrize("lanes", [ONE_AFTER_THE_OTHER, SIDE_BY_SIDE])


def doubled(lanes: int, mode: poptorch.OutputMode, period: int = 1) -> list[list[float]]:
    """Return the results of four iterations that double a row each."""
    opts = options(iterations=4).lanes(lanes).outputMode(mode, period)
    model = poptorch.inferenceModel(Calling(lambda x: x * 2), opts)
    rows: list[list[float]] = model(X).tolist()
    return rows


@each_number_of_lanes
def test_only_the_result_of_the_last_iteration_is_returned(lanes: int) -> None:
    assert doubled(lanes, poptorch.OutputMode.Final) == [[8.0]]


@each_number_of_lanes
def test_results_of_all_iterations_are_returned_in_order(lanes: int) -> None:
    assert doubled(lanes, poptorch.OutputMode.All) == [[2.0], [4.0], [6.0], [8.0]]


@each_number_of_lanes
def test_the_result_of_every_second_iteration_is_returned(lanes: int) -> None:
    assert doubled(lanes, poptorch.OutputMode.EveryN, 2) == [[4.0], [8.0]]


@each_number_of_lanes
def test_the_sum_over_all_iterations_is_returned(lanes: int) -> None:
    assert doubled(lanes, poptorch.OutputMode.Sum) == [[20.0]]


@pytest.mark.parametrize(
    ("lanes", "accumulation", "replicas"), [(1, 4, 1), (1, 2, 2), (2, 4, 1), (2, 2, 2)]
)
def test_a_running_mean_counts_the_runs_of_its_update(
    lanes: int, accumulation: int, replicas: int
) -> None:
    """The gradients of the four micro-batches are 1, 2, 3 and 4."""
    model = Having(
        lambda m, x: poptorch.identity_loss((m.weight * x).sum(), "none"),
        weight=nn.Parameter(torch.zeros(1)),
    )
    opts = options(accumulation=accumulation, replicas=replicas).lanes(lanes)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)

    poptorch.trainingModel(model, opts, optimizer)(X)

    torch.testing.assert_close(model.weight.detach(), torch.tensor([-2.5]))
