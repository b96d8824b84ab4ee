"""Functions of torch_geometric are swapped while a model is captured, in that thread only."""

import contextlib
import warnings
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.experimental import is_experimental_mode_enabled, set_experimental_mode
from torch_geometric.nn.pool.knn import L2KNNIndex  # noqa: F401 (imported, as programs may)

import poptorch
from helpers.wrapping import Calling, infer, options
from poptorch_geometric import _substitution, ops

GROUPS = torch.tensor([0, 0, 1])
ONES = torch.ones(3, 2)


@pytest.mark.spec("geometric", 83)
def test_an_aggregation_without_a_number_of_rows_is_refused_inside_a_model() -> None:
    aggregation = pyg.SumAggregation()

    with pytest.raises(ValueError, match="Argument 'dim_size' needs to be set"):
        infer(lambda x: aggregation(x, GROUPS), ONES)


@pytest.mark.spec("geometric", 83)
def test_an_aggregation_without_a_number_of_rows_works_outside_of_models() -> None:
    assert pyg.SumAggregation()(ONES, GROUPS).tolist() == [[2, 2], [1, 1]]


def test_an_aggregation_with_a_number_of_rows_works_inside_a_model() -> None:
    aggregation = pyg.SumAggregation()

    out = infer(lambda x: aggregation(x, GROUPS, dim_size=2), ONES)

    assert out.tolist() == [[2, 2], [1, 1]]


def test_pooling_without_a_number_of_graphs_is_refused_inside_a_model() -> None:
    with pytest.raises(poptorch.Error):
        infer(lambda x, numbers: pyg.global_mean_pool(x, numbers), ONES, GROUPS)


FLAG = "disable_dynamic_shapes"


def swapped() -> list[object]:
    """Everything that is swapped during a capture, as it is now."""
    functions = [vars(owner)[name] for owner, name, _ in _substitution._places(0)]
    methods = [vars(owner)[name] for owner, name, _ in _substitution.METHODS]
    return functions + methods


@dataclass
class Seen:
    """The functions that a thread sees while another thread captures a model."""

    flag: bool
    edges_without_loops: Any
    distributions_check_arguments: bool


def look() -> Seen:
    edges, _ = torch_geometric.utils.remove_self_loops(torch.tensor([[0, 1, 2], [0, 2, 2]]))
    return Seen(
        flag=is_experimental_mode_enabled(FLAG),
        edges_without_loops=edges.tolist(),
        distributions_check_arguments=torch.distributions.Bernoulli(0.5)._validate_args,
    )


class Capture:
    """Runs a model once, and keeps what the model and another thread saw meanwhile.

    Args:
        flag: the user's own setting of torch_geometric's experimental mode.
        fails: whether the model raises an exception.
    """

    def __init__(self, flag: bool, fails: bool) -> None:
        self.fails = fails
        self.before = swapped()
        with set_experimental_mode(flag, FLAG):
            model = poptorch.inferenceModel(Calling(self.forward), options())
            expected = pytest.raises(KeyError, match="a fault") if fails else None
            with expected or contextlib.nullcontext():
                model(torch.ones(2))
            self.flag_afterwards = is_experimental_mode_enabled(FLAG)
        self.after = swapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flag_inside = is_experimental_mode_enabled(FLAG)
        self.scatter_inside = torch_geometric.utils.scatter
        with futures.ThreadPoolExecutor(1) as threads:
            self.other_thread = threads.submit(look).result()
        if self.fails:
            raise KeyError("a fault of the model")
        return x + 1


captures = pytest.mark.parametrize(
    "flag, fails", [(False, True), (True, False)], ids=["a failing model", "a model"]
)


@captures
def test_inside_a_model_functions_are_swapped_and_the_experimental_flag_is_set(
    flag: bool, fails: bool
) -> None:
    capture = Capture(flag, fails)

    assert capture.flag_inside is True
    assert capture.scatter_inside is not torch_geometric.utils.scatter


@captures
def test_a_capture_does_not_affect_another_thread(flag: bool, fails: bool) -> None:
    usual = look()

    other_thread = Capture(flag, fails).other_thread

    assert other_thread.flag is False
    assert other_thread.edges_without_loops == usual.edges_without_loops
    assert other_thread.distributions_check_arguments == usual.distributions_check_arguments


@pytest.mark.spec("geometric", 84)
@captures
def test_after_a_capture_everything_is_as_before(flag: bool, fails: bool) -> None:
    capture = Capture(flag, fails)

    assert capture.flag_afterwards is flag
    assert len(capture.before) > 50
    for then, now in zip(capture.before, capture.after, strict=True):
        assert now is then


def test_neighbours_found_inside_a_model_that_are_missing_send_no_messages() -> None:
    torch.manual_seed(0)
    layer = pyg.EdgeConv(torch.nn.Linear(6, 4), aggr="sum")
    points = torch.rand(5, 3)
    groups = torch.tensor([0, 0, 0, 1, 1])
    all_pairs = [(a, b) for a in range(5) for b in range(5) if a != b and groups[a] == groups[b]]
    expected = layer(points, torch.tensor(all_pairs).t())

    got = infer(lambda x: layer(x, pyg.knn_graph(x, 2, groups)), points)

    torch.testing.assert_close(got, expected.detach())


def test_a_graph_of_points_within_a_radius_has_a_fixed_size_inside_a_model() -> None:
    edges = infer(lambda x: pyg.radius_graph(x, 0.4, max_num_neighbors=4), torch.rand(5, 3))

    assert edges.shape == (2, 5 * 4)


UNSORTED = torch.tensor([1, 0])


def test_our_aggregation_does_not_check_that_numbers_are_sorted() -> None:
    assert ops.Aggregation().assert_sorted_index(UNSORTED) is None


def test_torch_geometrics_aggregation_still_checks_that_numbers_are_sorted() -> None:
    with pytest.raises(ValueError, match="not sorted"):
        pyg.aggr.Aggregation().assert_sorted_index(UNSORTED)


def test_an_aggregation_of_sorted_numbers_works_inside_a_model_without_a_warning() -> None:
    aggregation = pyg.aggr.SortAggregation(k=2)
    groups = torch.tensor([0, 0, 0, 1, 1])
    x = torch.rand(5, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = infer(lambda x: aggregation(x, groups, dim_size=2, max_num_elements=4), x)

    torch.testing.assert_close(out, aggregation(x, groups, dim_size=2))
