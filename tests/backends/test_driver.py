"""Which results of the runs of a program a call returns, if no micro-batches run side by side."""

import torch

import poptorch
from helpers.wrapping import Calling, options

X = torch.tensor([[1.0], [2.0], [3.0], [4.0]])


def doubled(mode: poptorch.OutputMode, period: int = 1) -> list[list[float]]:
    """Return the results of four runs that double a row each."""
    opts = options(iterations=4).lanes(1).outputMode(mode, period)
    model = poptorch.inferenceModel(Calling(lambda x: x * 2), opts)
    rows: list[list[float]] = model(X).tolist()
    return rows


def test_only_the_result_of_the_last_run_is_returned() -> None:
    assert doubled(poptorch.OutputMode.Final) == [[8.0]]


def test_results_of_all_runs_are_returned_in_order() -> None:
    assert doubled(poptorch.OutputMode.All) == [[2.0], [4.0], [6.0], [8.0]]


def test_the_result_of_every_second_run_is_returned() -> None:
    assert doubled(poptorch.OutputMode.EveryN, 2) == [[4.0], [8.0]]


def test_the_sum_over_all_runs_is_returned() -> None:
    assert doubled(poptorch.OutputMode.Sum) == [[20.0]]
