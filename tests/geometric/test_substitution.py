"""What is swapped in torch_geometric while a model is captured, and only then."""

import contextlib
from concurrent import futures

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.experimental import is_experimental_mode_enabled, set_experimental_mode

import poptorch
from helpers.wrapping import Calling, infer, options
from poptorch_geometric import _substitution

FLAG = "disable_dynamic_shapes"


def swapped() -> list[object]:
    """Everything that may be swapped, as it is now."""
    functions = [vars(owner)[name] for owner, name, _ in _substitution._places(0)]
    return functions + [vars(owner)[name] for owner, name, _ in _substitution.METHODS]


def elsewhere() -> tuple[object, ...]:
    """What a thread finds that has nothing to do with a capture."""
    edges, _ = torch_geometric.utils.remove_self_loops(torch.tensor([[0, 1, 2], [0, 2, 2]]))
    checked = torch.distributions.Bernoulli(0.5)._validate_args
    return is_experimental_mode_enabled(FLAG), edges.tolist(), checked


@pytest.mark.spec("geometric", 83)
def test_aggregations_need_the_number_of_rows() -> None:
    aggregation, numbers = pyg.SumAggregation(), torch.tensor([0, 0, 1])
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="Argument 'dim_size' needs to be set"):
        infer(lambda x: aggregation(x, numbers), x)
    assert aggregation(x, numbers).tolist() == [[2, 2], [1, 1]]
    assert infer(lambda x: aggregation(x, numbers, dim_size=2), x).tolist() == [[2, 2], [1, 1]]
    with pytest.raises(poptorch.Error):
        infer(lambda x, numbers: pyg.global_mean_pool(x, numbers), x, numbers)


@pytest.mark.spec("geometric", 84)
@pytest.mark.parametrize("flag, fails", [(False, True), (True, False)])
def test_everything_is_as_before_afterwards(flag: bool, fails: bool) -> None:
    inside = []

    def forward(x):
        inside.extend([is_experimental_mode_enabled(FLAG), torch_geometric.utils.scatter])
        with futures.ThreadPoolExecutor(1) as threads:
            inside.append(threads.submit(elsewhere).result())
        if fails:
            raise KeyError("a fault of the model")
        return x + 1

    before, usual = swapped(), elsewhere()
    with set_experimental_mode(flag, FLAG):
        model = poptorch.inferenceModel(Calling(forward), options())
        with pytest.raises(KeyError, match="a fault") if fails else contextlib.nullcontext():
            model(torch.ones(2))
        assert is_experimental_mode_enabled(FLAG) == flag
    assert inside[0] is True
    assert inside[1] is not torch_geometric.utils.scatter
    assert inside[2][1:] == usual[1:]
    assert inside[2][0] is False
    assert all(now is then for now, then in zip(swapped(), before, strict=True))
    assert len(before) > 50


def test_neighbours_are_found_inside_models_and_missing_ones_send_nothing() -> None:
    torch.manual_seed(0)
    layer = pyg.EdgeConv(torch.nn.Linear(6, 4), aggr="sum")
    points, numbers = torch.rand(5, 3), torch.tensor([0, 0, 0, 1, 1])

    def forward(x):
        return layer(x, pyg.knn_graph(x, 2, numbers))

    full = [(a, b) for a in range(5) for b in range(5) if a != b and numbers[a] == numbers[b]]
    expected = layer(points, torch.tensor(full).t())
    torch.testing.assert_close(infer(forward, points), expected.detach())
    assert infer(lambda x: pyg.radius_graph(x, 0.4, max_num_neighbors=4), points).shape == (2, 20)
