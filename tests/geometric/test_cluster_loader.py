"""Clusters of one graph, and partitions without METIS."""

import pytest
import torch
from torch_geometric.loader import ClusterLoader

import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import options
from poptorch_geometric import pyg_cluster_loader
from poptorch_geometric.cluster_loader import ClusterData, FixedSizeClusterLoader
from poptorch_geometric.pyg_cluster_loader import parts

SIZES = {"num_nodes": 60, "num_edges": 300, "num_graphs": 2}


@pytest.fixture(scope="module")
def clusters() -> ClusterData:
    return ClusterData(made.random_graph(), 6, log=False)


@pytest.mark.spec("geometric", 66)
def test_merged_clusters_are_one_graph(clusters: ClusterData) -> None:
    opts = options(iterations=3)
    loader = FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(**SIZES), 2, options=opts)
    assert loader.cluster_data is clusters
    assert len(loader) == 1
    (batch,) = loader
    theirs = list(ClusterLoader(clusters, batch_size=2))
    assert (batch.num_graphs, batch.x.shape) == (2, (180, 4))
    assert batch.edge_index.shape == (6, 300)
    for at, expected in enumerate(theirs):
        nodes = slice(60 * at, 60 * at + expected.num_nodes)
        assert torch.equal(batch.x[nodes], expected.x)
        edges = batch.edge_index[2 * at : 2 * at + 2, : expected.num_edges]
        assert torch.equal(edges, expected.edge_index)
        numbers = batch.batch[60 * at : 60 * at + 60]
        assert numbers.tolist() == [int(n >= expected.num_nodes) for n in range(60)]
        assert not batch.train_mask[nodes.stop : 60 * at + 60].any()
    plain = pyg_cluster_loader.FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(**SIZES), 2)
    assert len(list(plain)) == 3


@pytest.mark.spec("geometric", 67)
def test_what_does_not_fit_is_trimmed_or_refused(clusters: ClusterData) -> None:
    for name in ("shuffle", "collate_fn", "batch_sampler", "exclude_keys"):
        with pytest.raises(AssertionError, match=f"does not support the argument '{name}'"):
            FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(**SIZES), **{name: None})
    with pytest.raises(AssertionError, match="num_graphs=2"):
        FixedSizeClusterLoader(clusters, pg.FixedSizeOptions(60, 300, 3))
    small = pg.FixedSizeOptions(8, 10)
    for batch in FixedSizeClusterLoader(clusters, small):
        assert (batch.num_nodes, batch.num_edges) == (8, 10)
    strict = FixedSizeClusterLoader(clusters, small, over_size_strategy=pg.OverSizeStrategy.Error)
    with pytest.raises(RuntimeError, match="enough space"):
        list(strict)


def test_parts_are_of_like_size_with_few_edges_between() -> None:
    # Four rings of 25, joined by single edges: the best cut is known.
    ring = torch.arange(25)
    edges = torch.cat([torch.stack([ring, (ring + 1) % 25]) + 25 * at for at in range(4)], dim=1)
    edges = torch.cat([edges, torch.tensor([[0, 25, 50], [25, 50, 75]])], dim=1)
    shuffled = torch.randperm(100)
    part = parts(shuffled[edges], 100, 4)
    assert part.bincount(minlength=4).max() <= 27
    cut = (part[shuffled[edges[0]]] != part[shuffled[edges[1]]]).sum()
    assert cut <= 16
    at_random = torch.randint(4, (100,))
    assert cut < (at_random[edges[0]] != at_random[edges[1]]).sum() / 4
    assert parts(torch.empty(2, 0, dtype=torch.int64), 3, 3).tolist() == [0, 1, 2]
