"""Clusters of a large graph, merged into batches of one size."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import ClusterLoader

import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import options
from poptorch_geometric import pyg_cluster_loader
from poptorch_geometric.cluster_loader import ClusterData, FixedSizeClusterLoader
from poptorch_geometric.pyg_cluster_loader import parts

NODES = 60
EDGES = 300


def sizes() -> pg.FixedSizeOptions:
    return pg.FixedSizeOptions(num_nodes=NODES, num_edges=EDGES, num_graphs=2)


@pytest.fixture(scope="module")
def clusters() -> ClusterData:
    """A random graph of 60 nodes in six clusters."""
    return ClusterData(made.random_graph(), 6, log=False)


@pytest.fixture(scope="module")
def loader(clusters: ClusterData) -> FixedSizeClusterLoader:
    """Loads two clusters a micro-batch, in three device iterations: one batch is all of them."""
    return FixedSizeClusterLoader(clusters, sizes(), 2, options=options(iterations=3))


@pytest.fixture(scope="module")
def batch(loader: FixedSizeClusterLoader) -> Data:
    (only,) = loader
    return only


@pytest.fixture(scope="module")
def without_padding(clusters: ClusterData) -> list[Data]:
    """The three micro-batches that torch_geometric's own loader makes."""
    return list(ClusterLoader(clusters, batch_size=2))


def test_a_cluster_loader_knows_its_data_and_its_length(
    loader: FixedSizeClusterLoader, clusters: ClusterData
) -> None:
    assert loader.cluster_data is clusters
    assert len(loader) == 1


@pytest.mark.spec("geometric", 66)
def test_a_batch_is_one_graph_of_merged_clusters_and_one_of_padding(batch: Data) -> None:
    assert batch.num_graphs == 2
    assert batch.x.shape == (3 * NODES, 4)
    assert batch.edge_index.shape == (3 * 2, EDGES)


@pytest.mark.parametrize("at", range(3))
def test_micro_batches_begin_with_the_clusters_that_torch_geometric_merges(
    batch: Data, without_padding: list[Data], at: int
) -> None:
    expected = without_padding[at]

    nodes = batch.x[NODES * at :][: expected.num_nodes]
    edges = batch.edge_index[2 * at :][:2, : expected.num_edges]

    assert torch.equal(nodes, expected.x)
    assert torch.equal(edges, expected.edge_index)


@pytest.mark.spec("geometric", 66)
@pytest.mark.parametrize("at", range(3))
def test_nodes_of_clusters_have_the_number_0_and_those_of_padding_1(
    batch: Data, without_padding: list[Data], at: int
) -> None:
    real = without_padding[at].num_nodes

    numbers = batch.batch[NODES * at :][:NODES]

    assert numbers.tolist() == [0] * real + [1] * (NODES - real)


@pytest.mark.parametrize("at", range(3))
def test_no_padding_is_trained_on(batch: Data, without_padding: list[Data], at: int) -> None:
    real = without_padding[at].num_nodes

    of_padding = batch.train_mask[NODES * at :][real:NODES]

    assert not of_padding.any()


def test_the_plain_cluster_loader_loads_one_micro_batch_at_a_time(clusters: ClusterData) -> None:
    plain = pyg_cluster_loader.FixedSizeClusterLoader(clusters, sizes(), 2)

    assert len(list(plain)) == 3


@pytest.mark.spec("geometric", 67)
@pytest.mark.parametrize("name", ["shuffle", "collate_fn", "batch_sampler", "exclude_keys"])
def test_arguments_that_make_no_sense_for_clusters_are_refused(
    clusters: ClusterData, name: str
) -> None:
    with pytest.raises(AssertionError, match=f"does not support the argument '{name}'"):
        FixedSizeClusterLoader(clusters, sizes(), **{name: None})


@pytest.mark.spec("geometric", 67)
def test_sizes_for_more_than_two_graphs_are_refused(clusters: ClusterData) -> None:
    with pytest.raises(AssertionError, match="num_graphs=2"):
        FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(NODES, EDGES, 3))


def test_clusters_that_do_not_fit_are_trimmed(clusters: ClusterData) -> None:
    for batch in FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(8, 10)):
        assert batch.num_nodes == 8
        assert batch.num_edges == 10


def test_clusters_that_do_not_fit_are_an_error_if_the_strategy_says_so(
    clusters: ClusterData,
) -> None:
    small = pg.FixedSizeOptions(8, 10)
    strict = FixedSizeClusterLoader(clusters, small, over_size_strategy=pg.OverSizeStrategy.Error)

    with pytest.raises(RuntimeError, match="enough space"):
        list(strict)


# How a graph is divided.


@pytest.fixture
def rings() -> torch.Tensor:
    """Edges of four rings of 25 nodes, which single edges join, with shuffled numbers.

    The best division into four is known: it cuts three edges.
    """
    ring = torch.arange(25)
    around = torch.cat([torch.stack([ring, (ring + 1) % 25]) + 25 * at for at in range(4)], dim=1)
    between = torch.tensor([[0, 25, 50], [25, 50, 75]])
    return torch.randperm(100)[torch.cat([around, between], dim=1)]


def edges_cut(edges: torch.Tensor, part: torch.Tensor) -> int:
    """How many edges join nodes of two parts."""
    return int((part[edges[0]] != part[edges[1]]).sum())


def test_parts_have_about_the_same_size(rings: torch.Tensor) -> None:
    part = parts(rings, 100, 4)

    assert part.bincount(minlength=4).max() <= 27


def test_few_edges_join_different_parts(rings: torch.Tensor) -> None:
    cut = edges_cut(rings, parts(rings, 100, 4))

    assert cut <= 16
    assert cut < edges_cut(rings, torch.randint(4, (100,))) / 4


def test_nodes_without_edges_are_shared_out() -> None:
    no_edges = torch.empty(2, 0, dtype=torch.int64)

    assert parts(no_edges, 3, 3).tolist() == [0, 1, 2]
