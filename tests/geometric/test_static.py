"""Operations that shorten lists in eager torch_geometric have an upper bound in wrapped models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data

from helpers import graphs as made
from helpers.cases import few
from helpers.closeness import near
from helpers.wrapping import infer, trains_alike

LOOPED = torch.tensor([[0, 1, 2, 2, 3, 1], [1, 1, 0, 2, 3, 0]])
"""Six edges; three lead from a node to itself."""
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5, 0.7])
FEATURES = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
TYPES = torch.tensor([0, 1, 2, 0, 1, 2])
SHRINKING: dict[str, tuple[Callable[[], torch.nn.Module], tuple[torch.Tensor, ...]]] = {
    "GCN": (lambda: pyg.GCNConv(4, 3), (FEATURES, LOOPED, WEIGHTS)),
    "improved GCN": (lambda: pyg.GCNConv(4, 3, improved=True), (FEATURES, LOOPED)),
    "GAT": (lambda: pyg.GATConv(4, 3, edge_dim=1, fill_value="mean"), (FEATURES, LOOPED, WEIGHTS)),
    "GATv2": (lambda: pyg.GATv2Conv(4, 3), (FEATURES, LOOPED)),
    "Cheb": (lambda: pyg.ChebConv(4, 3, 2), (FEATURES, LOOPED, WEIGHTS)),
    "RGCN": (lambda: pyg.RGCNConv(4, 3, 3), (FEATURES, LOOPED, TYPES)),
    "FiLM": (lambda: pyg.FiLMConv(4, 3, 2), (FEATURES, LOOPED, TYPES % 2)),
    "EG": (lambda: pyg.EGConv(4, 4, ["symnorm"], 2), (FEATURES, LOOPED)),
}
"""Layers that drop edges from a list in eager torch_geometric, with their inputs.

Making one takes a tenth of a second, so a test makes only its own.
"""


@pytest.mark.spec("geometric", 82)
@pytest.mark.parametrize("name", few(SHRINKING, "GCN", "GAT", "RGCN"))
def test_edges_that_a_layer_drops_do_not_count(name: str) -> None:
    make, inputs = SHRINKING[name]

    trains_alike(made.Layer(make()), *inputs)


class Pooling:
    """Pools the best nodes of three graphs, then sums a layer over each graph."""

    def __init__(self, kind: type[torch.nn.Module], ratio: float, least: float | None) -> None:
        torch.manual_seed(1)
        self.batch = Batch.from_data_list(made.molecules(3))
        self.pool = kind(2, ratio=ratio, min_score=least)
        self.layer = pyg.GraphConv(2, 3)

    def __call__(self, x: Any, edge_index: Any, numbers: Any) -> tuple[torch.Tensor, ...]:
        """Return the sums, the nodes that were chosen, and the numbers of their graphs."""
        x, edge_index, _, numbers, chosen, _ = self.pool(x, edge_index, batch=numbers)
        return pyg.global_add_pool(self.layer(x, edge_index), numbers, 3), chosen, numbers

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.batch.x, self.batch.edge_index, self.batch.batch


@pytest.fixture(
    params=[(pyg.TopKPooling, 0.5, None), (pyg.TopKPooling, 0.5, 0.3), (pyg.SAGPooling, 2, None)],
    ids=["half of the nodes", "nodes with a minimum score", "two nodes"],
)
def pooling(request: pytest.FixtureRequest) -> Pooling:
    return Pooling(*request.param)


def test_pooling_of_the_best_nodes_gives_the_values_of_eager_torch_geometric(
    pooling: Pooling,
) -> None:
    expected, _, _ = pooling(*pooling.inputs)

    out, _, _ = infer(pooling, *pooling.inputs)

    torch.testing.assert_close(out, expected.detach(), **near(24, 3))


def test_pooling_chooses_the_same_nodes_and_fills_up_with_minus_one(pooling: Pooling) -> None:
    _, expected, _ = pooling(*pooling.inputs)

    _, chosen, _ = infer(pooling, *pooling.inputs)

    filled_up = pooling.batch.num_nodes - len(expected)
    assert chosen.tolist() == [*expected.tolist(), *[-1] * filled_up]


def test_places_that_pooling_fills_up_belong_to_no_graph(pooling: Pooling) -> None:
    _, chosen, numbers = infer(pooling, *pooling.inputs)

    assert torch.equal(numbers < 0, chosen < 0)


@pytest.fixture
def graph() -> Data:
    return made.random_graph()


def drop_half(edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop each edge with a probability of one half; return also a mask of those kept."""
    return torch_geometric.utils.dropout_edge(edge_index, p=0.5)


def drop_half_of_pairs(edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop half of the pairs of nodes; return also the number of the edge of each that is kept."""
    return torch_geometric.utils.dropout_edge(edge_index, p=0.5, force_undirected=True)


def test_dropped_edges_keep_their_place_and_are_marked_with_minus_one(graph: Data) -> None:
    edges, kept = infer(drop_half, graph.edge_index)

    assert edges.shape == graph.edge_index.shape
    assert 0.3 < kept.float().mean() < 0.7
    assert torch.equal(edges[:, kept], graph.edge_index[:, kept].int())
    assert (edges[:, ~kept] == -1).all()


def test_pairs_of_edges_are_dropped_together(graph: Data) -> None:
    edges, numbers = infer(drop_half_of_pairs, graph.edge_index)

    kept = edges[0] >= 0
    there, back = kept.chunk(2)  # first all edges in one direction, then in the other
    numbers_there, numbers_back = numbers.long().chunk(2)
    expected_there = graph.edge_index[:, numbers_there[there]]
    expected_back = graph.edge_index[:, numbers_back[back]].flip(0)
    expected = torch.cat([expected_there, expected_back], dim=1)
    assert torch.equal(edges[:, kept], expected.int())
