"""Parts of large graphs: clusters, neighbours of seeds, samples of both."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import ClusterLoader
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import k_hop_subgraph

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import options
from poptorch_geometric import pyg_cluster_loader
from poptorch_geometric._sampling import NeighborSampler
from poptorch_geometric.cluster_loader import ClusterData, FixedSizeClusterLoader
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader, PyGFixedSizeNeighborLoader
from poptorch_geometric.pyg_cluster_loader import parts

GRAPH = made.random_graph()


def sample(data, fanouts, seeds, time=None, input_type=None, **how):
    nodes = torch.tensor(seeds)
    given = NodeSamplerInput(torch.arange(len(nodes)), nodes, time, input_type)
    return NeighborSampler(data, fanouts, **how).sample_from_nodes(given)


def edges_of(out) -> torch.Tensor:
    """The sampled edges in numbers of the whole graph."""
    return torch.stack([out.node[out.row], out.node[out.col]])


def test_all_neighbours_are_the_whole_neighbourhood() -> None:
    out = sample(GRAPH, [-1, -1], [3, 7])
    nodes, _, _, _ = k_hop_subgraph([3, 7], 2, GRAPH.edge_index)
    assert (out.node[:2].tolist(), sorted(out.node.tolist())) == ([3, 7], sorted(nodes.tolist()))
    assert torch.equal(edges_of(out), GRAPH.edge_index[:, out.edge])
    inner = out.node[: sum(out.num_sampled_nodes[:2])]
    assert len(out.edge) == torch.isin(GRAPH.edge_index[1], inner).sum()
    assert (out.num_sampled_nodes[0], sum(out.num_sampled_nodes)) == (2, len(out.node))
    assert sum(out.num_sampled_edges) == len(out.edge)
    induced = sample(GRAPH, [-1, -1], [3, 7], subgraph_type="induced")
    assert len(induced.edge) == torch.isin(GRAPH.edge_index, nodes).all(0).sum()
    both = sample(GRAPH, [2, 2], [3, 7], subgraph_type="bidirectional")
    pairs = set(map(tuple, edges_of(both).t().tolist()))
    assert pairs == {(b, a) for a, b in pairs}


def test_so_many_neighbours_are_drawn_without_repetition() -> None:
    degree, drawn = GRAPH.edge_index[1].bincount(minlength=60), set()
    for _ in range(20):
        out = sample(GRAPH, [3], [*range(60)])
        assert torch.equal(out.col.bincount(minlength=60), degree.clamp(max=3))
        assert len(out.edge.unique()) == len(out.edge)
        assert torch.equal(edges_of(out), GRAPH.edge_index[:, out.edge])
        drawn.update(out.edge.tolist())
    assert len(drawn) > 0.9 * GRAPH.num_edges
    more = sample(GRAPH, [9], [0], replace=True)
    assert len(more.edge) == 9
    assert len(more.edge.unique()) < 9


def test_weights_say_how_likely() -> None:
    star = Data(edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5,
                weight=torch.tensor([0.0, 1.0, 0.0, 3.0]))  # fmt: skip
    for replace in (False, True):
        counts = torch.zeros(5)
        for _ in range(200):
            out = sample(star, [1], [0], weight_attr="weight", replace=replace)
            counts[out.node[out.row]] += 1
        assert counts[[0, 1, 3]].sum() == 0
        assert 110 < counts[4] < 185
    with pytest.raises(poptorch.Error, match="attribute to sample by"):
        sample(star, [1], [0], weight_attr="missing")


def test_disjoint_seeds_have_trees_of_their_own() -> None:
    out = sample(GRAPH, [-1], [3, 3], disjoint=True)
    neighbours = int((GRAPH.edge_index[1] == 3).sum())
    assert (out.node[:2].tolist(), len(out.node)) == ([3, 3], 2 + 2 * neighbours)
    assert out.batch.bincount().tolist() == [1 + neighbours] * 2
    assert torch.equal(out.batch[out.row], out.batch[out.col])


def test_neighbours_are_not_later_than_their_seed() -> None:
    data = Data(edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5,
                time=torch.tensor([2, 0, 1, 2, 3]))  # fmt: skip
    assert sorted(sample(data, [-1], [0], time_attr="time").node.tolist()) == [0, 1, 2, 3]
    latest = sample(data, [1], [0], time_attr="time", temporal_strategy="last")
    assert latest.node.tolist() == [0, 3]
    earlier = sample(data, [-1], [0], time=torch.tensor([1]), time_attr="time")
    assert sorted(earlier.node.tolist()) == [0, 1, 2]
    data.when = torch.tensor([5, 6, 7, 8])
    by_edge = sample(data, [-1], [0], time=torch.tensor([6]), time_attr="when")
    assert sorted(by_edge.node.tolist()) == [0, 1, 2]
    with pytest.raises(poptorch.Error, match="needs the time of every seed"):
        sample(data, [-1], [0], time_attr="when")
    with pytest.raises(poptorch.Error, match="temporal_strategy"):
        sample(data, [-1], [0], temporal_strategy="first")


def test_types_are_sampled_each_with_its_number() -> None:
    data = made.hetero_graph()
    fanouts = {made.EDGES[0]: [2, 1], made.EDGES[1]: [3, 2], made.EDGES[2]: [1, 0]}
    out = sample(data, fanouts, [4, 9], input_type="v0")
    assert (out.node["v0"][:2].tolist(), out.num_sampled_edges[made.EDGES[0]][0]) == ([4, 9], 0)
    for kind in made.EDGES:
        source, _, target = kind
        pairs = torch.stack([out.node[source][out.row[kind]], out.node[target][out.col[kind]]])
        assert torch.equal(pairs, data[kind].edge_index[:, out.edge[kind]])
    degree = data[made.EDGES[1]].edge_index[1].bincount(minlength=30)
    assert out.num_sampled_edges[made.EDGES[1]][0] == degree[[4, 9]].clamp(max=3).sum()
    with pytest.raises(NotImplementedError, match="starts from nodes"):
        NeighborSampler(data, fanouts).sample_from_edges(None)


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


ALL = [-1, -1]  # nothing is drawn
OF_SEEDS = {"num_nodes": 61, "num_edges": 800, "num_graphs": 2}


def loader(**others) -> FixedSizeNeighborLoader:
    arguments = {"batch_size": 4, "fixed_size_options": pg.FixedSizeOptions(**OF_SEEDS)} | others
    return FixedSizeNeighborLoader(GRAPH, arguments.pop("num_neighbors", ALL), **arguments)


@pytest.mark.spec("geometric", 68, 69, 70, 71)
def test_seeds_come_first_and_are_never_trimmed() -> None:
    nodes, sizes = torch.arange(0, 46, 2), pg.FixedSizeOptions(**OF_SEEDS, node_pad_value=-1)
    sampled = loader(input_nodes=nodes, shuffle=True, fixed_size_options=sizes,
                     options=options(iterations=2))  # fmt: skip
    assert len(sampled) == 23 // 8
    for batch in sampled:
        assert ((batch.batch_size, batch.input_id.shape), batch.n_id.shape) == ((4, (8,)), (122,))
        for at in range(2):
            seeds = nodes[batch.input_id[4 * at : 4 * at + 4]]
            assert torch.equal(batch.n_id[61 * at : 61 * at + 4], seeds)
            real = batch.nodes_mask[61 * at : 61 * at + 61]
            numbers = batch.n_id[61 * at : 61 * at + 61]
            assert torch.equal(batch.x[61 * at : 61 * at + 61][real], GRAPH.x[numbers[real]])
            assert (numbers[~real] == -1).all()
    for batch in loader(fixed_size_options=pg.FixedSizeOptions(7, 5)):
        assert (batch.num_nodes, batch.num_edges) == (7, 5)
        assert torch.equal(batch.n_id[:4], batch.input_id)


@pytest.mark.spec("geometric", 73)
def test_the_two_halves_make_the_whole() -> None:
    sampled = loader()
    for at, batch in enumerate(sampled):
        native = sampled.nativeCollate([*range(4 * at, 4 * at + 4)])
        assert native.num_nodes < 61
        assert made.same(sampled.fixedSizeCollate(native), batch)
    assert sampled.input_type is None


@pytest.mark.spec("geometric", 72)
def test_seeds_of_one_type() -> None:
    sampled = FixedSizeNeighborLoader(
        made.hetero_graph(), [3, 2], input_nodes=("v0", None), batch_size=5,
        fixed_size_options=pg.FixedSizeOptions(31, 91), options=options(iterations=2),
    )  # fmt: skip
    assert (sampled.input_type, len(sampled)) == ("v0", 3)
    batch = next(iter(sampled))
    assert (batch["v0"].batch_size, batch["v0"].input_id.tolist()) == (5, [*range(10)])
    assert "batch_size" not in batch["v1"]
    assert batch["v0"].n_id[:5].tolist() == [*range(5)]
    for kind in made.EDGES:
        assert batch[kind].edge_index.shape == (4, batch[kind].num_edges)
        assert batch[kind].edges_mask.dtype == torch.bool


def test_sizes_default_to_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    function = pg.FixedSizeOptions.from_loader.__func__
    monkeypatch.setattr(function, "__defaults__", (15,))  # 1000 samples take seconds
    sampled = FixedSizeNeighborLoader(GRAPH, ALL, batch_size=4)
    largest = max(sampled.nativeCollate([*range(at, at + 4)]).num_nodes for at in range(0, 60, 4))
    assert sampled.fixed_size_options.num_nodes == largest + 1
    batch = next(iter(PyGFixedSizeNeighborLoader(GRAPH, ALL, batch_size=4)))
    assert "nodes_mask" not in batch
    assert batch.num_nodes == largest + 1


def test_torch_geometrics_own_checks_pass_through() -> None:
    with pytest.raises(ValueError, match="input_time"):
        loader(input_time=torch.arange(60))
    with pytest.raises(ValueError, match="Number of hops"):
        fanouts = dict(zip(made.EDGES, ([2, 2], [2], [2, 2]), strict=True))
        FixedSizeNeighborLoader(made.hetero_graph(), fanouts, input_nodes="v0")
    with pytest.raises(AssertionError, match="num_graphs=2"):
        loader(fixed_size_options=pg.FixedSizeOptions(60, 300, 3))
