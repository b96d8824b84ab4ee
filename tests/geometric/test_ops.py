"""Nearest points, points within a radius, interpolation, and layers with fixed sizes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.utils import scatter

import poptorch
from helpers import graphs as made
from helpers.wrapping import agrees, infer, options, trains_alike
from poptorch_geometric import ops

POINTS = torch.rand(20, 3, generator=torch.Generator().manual_seed(4))
OTHERS = torch.rand(7, 3, generator=torch.Generator().manual_seed(5))
GROUPS = torch.tensor([0] * 12 + [1] * 2 + [2] * 6)
"""The number of each point's example: 12, 2 and 6 points."""
OTHER_GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 2])

Pairs = set[tuple[int, int]]


def searched(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: torch.Tensor,
    batch_y: torch.Tensor,
    keep: Callable[[torch.Tensor], list[int]],
) -> Pairs:
    """Pairs (of y, of x) of one example, found by looking at every distance.

    Args:
        x: the points that are searched.
        y: the points whose neighbours are searched.
        batch_x: the example of each point of ``x``.
        batch_y: the example of each point of ``y``.
        keep: from the distances of one point of ``y``, the places of those to keep.
    """
    pairs = set()
    for at in range(len(y)):
        same_example = (batch_x == batch_y[at]).nonzero()[:, 0]
        distances = (x[same_example] - y[at]).norm(dim=1)
        pairs |= {(at, int(same_example[place])) for place in keep(distances)}
    return pairs


def four_nearest(distances: torch.Tensor) -> list[int]:
    places: list[int] = distances.argsort()[:4].tolist()
    return places


def within_half(distances: torch.Tensor) -> list[int]:
    places: list[int] = (distances <= 0.5).nonzero()[:, 0].tolist()
    return places


def pairs_of(pairs: torch.Tensor) -> Pairs:
    """The pairs of a result, without those that are missing."""
    return {(a, b) for a, b in pairs.t().tolist() if a >= 0}


# Nearest points.


@pytest.fixture(scope="module")
def nearest() -> torch.Tensor:
    """The four nearest of the points to each of the seven others, in its own example."""
    return ops.knn(POINTS, OTHERS, 4, GROUPS, OTHER_GROUPS)


@pytest.mark.spec("geometric", 85)
def test_knn_finds_the_pairs_that_a_search_finds(nearest: torch.Tensor) -> None:
    assert nearest.shape == (2, 7 * 4)
    assert pairs_of(nearest) == searched(POINTS, OTHERS, GROUPS, OTHER_GROUPS, four_nearest)


@pytest.mark.spec("geometric", 85)
def test_missing_neighbours_are_marked_on_both_sides(nearest: torch.Tensor) -> None:
    """The example of the third and fourth point has two points, where four are asked for."""
    assert torch.equal(nearest[0] == -1, nearest[1] == -1)
    assert (nearest.view(2, 7, 4)[:, 2:4, 2:] == -1).all()


@pytest.mark.spec("geometric", 85)
def test_knn_returns_the_nearest_points_first(nearest: torch.Tensor) -> None:
    distances = (POINTS[nearest[1]] - OTHERS[nearest[0]]).norm(dim=1)
    of_the_first = distances.view(7, 4)[0]

    assert of_the_first.diff().min() >= 0


def test_knn_finds_the_same_inside_a_model(nearest: torch.Tensor) -> None:
    got = infer(lambda x, y: ops.knn(x, y, 4, GROUPS, OTHER_GROUPS), POINTS, OTHERS)

    assert torch.equal(got, nearest.int())


def test_knn_of_equal_points_finds_all_of_them() -> None:
    _, points = ops.knn(torch.zeros(3), torch.zeros(2), 5).view(2, 2, 5)

    assert (points[:, :3] >= 0).all()
    assert (points[:, 3:] == -1).all()


def test_knn_by_angle_ignores_lengths() -> None:
    others, points = ops.knn(POINTS, 9 * POINTS, 1, cosine=True)

    assert torch.equal(others, points)


def test_numbers_of_examples_of_another_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="index of its example"):
        ops.knn(POINTS, OTHERS, 2, GROUPS[:3], OTHER_GROUPS)


def test_points_of_another_dimension_are_refused() -> None:
    with pytest.raises(AssertionError, match="the same number of coordinates"):
        ops.knn(POINTS, OTHERS[:, :2], 2)


@pytest.mark.spec("geometric", 87)
@pytest.mark.parametrize("loop", [True, False], ids=["with loops", "without loops"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_a_graph_of_nearest_points_has_the_edges_that_a_search_finds(loop: bool, flow: str) -> None:
    """The nearest point to a point is itself: without loops it is left out."""
    ranks = slice(0, 3) if loop else slice(1, 4)

    edges = ops.knn_graph(POINTS, 3, GROUPS, loop=loop, flow=flow)

    from_centre = edges.flip(0) if flow == "source_to_target" else edges
    expected = searched(POINTS, POINTS, GROUPS, GROUPS, lambda d: d.argsort()[ranks].tolist())
    assert edges.shape == (2, 20 * 3)
    assert pairs_of(from_centre) == expected


@pytest.mark.spec("geometric", 87)
def test_an_unknown_flow_is_refused() -> None:
    with pytest.raises(AssertionError, match="Unknown value of flow"):
        ops.knn_graph(POINTS, 3, flow="up")


# Points within a radius.


@pytest.mark.spec("geometric", 86)
def test_radius_finds_the_pairs_that_a_search_finds() -> None:
    pairs = ops.radius(POINTS, OTHERS, 0.5, GROUPS, OTHER_GROUPS)

    assert pairs.shape == (2, 7 * 20)
    assert pairs_of(pairs) == searched(POINTS, OTHERS, GROUPS, OTHER_GROUPS, within_half)


def test_a_maximum_of_neighbours_decides_the_size() -> None:
    assert ops.radius(POINTS, OTHERS, 9.0, max_num_neighbors=2).shape == (2, 7 * 2)


@pytest.mark.spec("geometric", 86)
def test_points_may_be_integers() -> None:
    pairs = ops.radius(torch.tensor([[0], [3]]), torch.tensor([[1]]), 1.5)

    assert pairs.tolist() == [[0, -1], [0, -1]]


def test_a_graph_of_points_within_a_radius_has_no_loops() -> None:
    edges = ops.radius_graph(POINTS, 0.5, GROUPS)

    expected = searched(POINTS, POINTS, GROUPS, GROUPS, within_half)
    assert pairs_of(edges.flip(0)) == {(a, b) for a, b in expected if a != b}


# Interpolation.

TWELVE_AND_EIGHT = torch.tensor([0] * 12 + [1] * 8)
TWO_AND_FIVE = torch.tensor([0, 0, 1, 1, 1, 1, 1])


@pytest.fixture
def features() -> torch.Tensor:
    """Five features of every point."""
    return torch.rand(20, 5, requires_grad=True)


def interpolated(x: torch.Tensor) -> torch.Tensor:
    """Features of the other points, from three of the points each."""
    return ops.knn_interpolate(x, POINTS, OTHERS, TWELVE_AND_EIGHT, TWO_AND_FIVE, k=3)


@pytest.mark.spec("geometric", 88)
def test_interpolated_features_are_weighted_by_the_inverse_square_of_the_distance(
    features: torch.Tensor,
) -> None:
    others, points = ops.knn(POINTS, OTHERS, 3, TWELVE_AND_EIGHT, TWO_AND_FIVE)
    squares = (POINTS[points] - OTHERS[others]).square().sum(-1, keepdim=True)
    weights = 1 / squares.clamp(1e-16)
    sums = scatter(features[points] * weights, others, 0, 7)

    out = interpolated(features)

    torch.testing.assert_close(out, sums / scatter(weights, others, 0, 7))


def test_interpolation_has_a_gradient(features: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(interpolated(features).sum(), features)

    assert gradient.any()


def test_interpolation_agrees_inside_a_model(features: torch.Tensor) -> None:
    agrees(interpolated, features.detach())


def test_a_point_without_neighbours_gets_zeros(features: torch.Tensor) -> None:
    example_without_points = torch.full((7,), 5)

    out = ops.knn_interpolate(features, POINTS, OTHERS, GROUPS, example_without_points)

    assert torch.equal(out, torch.zeros(7, 5))


def test_a_point_with_too_few_neighbours_gets_finite_features(features: torch.Tensor) -> None:
    out = ops.knn_interpolate(features, POINTS, OTHERS, GROUPS, OTHER_GROUPS)

    assert out.isfinite().all()


# Layers.

GRAPH = made.random_graph(12, 30)
KINDS = torch.arange(12) % 3

LAYERS: dict[str, tuple[torch.nn.Module, tuple[Any, ...]]] = {
    "HeteroLinear": (ops.HeteroLinear(4, 5, 3), (GRAPH.x, KINDS)),
    "MFConv": (ops.MFConv(4, 5, max_degree=3), (GRAPH.x, GRAPH.edge_index)),
    "ClusterGCNConv": (ops.ClusterGCNConv(4, 5, 0.5), (GRAPH.x, GRAPH.edge_index)),
    "InstanceNorm": (ops.InstanceNorm(4, affine=True), (GRAPH.x,)),
    "InstanceNorm with running statistics": (
        ops.InstanceNorm(4, affine=True, track_running_stats=True),
        (GRAPH.x, KINDS.sort()[0], 3),
    ),
}
"""Our layers and their inputs."""


class Layer:
    """One of our layers, the layer of torch_geometric with the same weights, and their inputs."""

    def __init__(self, name: str) -> None:
        layer, self.inputs = LAYERS[name]
        self.our_class = type(layer)
        self.their_class = getattr(pyg, self.our_class.__name__)
        arguments = (4,) if "Norm" in name else (4, 5, 3)
        self.their_class(*arguments)  # compiles the methods that a change of class relies on
        self.ours = copy.deepcopy(layer)
        self.theirs = copy.deepcopy(layer)
        self.theirs.__class__ = self.their_class


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


@pytest.fixture(params=["our class", "torch_geometric's class"])
def wrapped(request: pytest.FixtureRequest, layer: Layer) -> torch.nn.Module:
    """The layer as our class or as that of torch_geometric: both work in wrapped models."""
    of_ours = request.param == "our class"
    layer.ours.__class__ = layer.our_class if of_ours else layer.their_class
    return layer.ours


@pytest.mark.spec("geometric", 89)
def test_our_layers_give_the_values_of_torch_geometric(layer: Layer) -> None:
    torch.testing.assert_close(layer.ours(*layer.inputs), layer.theirs(*layer.inputs))


@pytest.mark.slow
@pytest.mark.spec("geometric", 89)
def test_layers_train_inside_a_model_as_torch_geometrics_train(
    layer: Layer, wrapped: torch.nn.Module
) -> None:
    tensors, last = layer.inputs[:2], layer.inputs[2:]
    model = made.Layer(wrapped, *last)
    eager = made.Layer(layer.theirs, *last)

    trains_alike(model, *tensors, eager=eager)

    evaluated = poptorch.inferenceModel(model.layer.eval(), options())(*layer.inputs)
    expected = eager.layer.eval()(*layer.inputs)
    torch.testing.assert_close(evaluated, expected.detach())
