"""Our own neighbour sampler: hops, draws, types, time."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import k_hop_subgraph

import poptorch
from helpers import graphs as made
from poptorch_geometric._sampling import NeighborSampler

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
    assert out.node[:2].tolist() == [3, 7]
    assert sorted(out.node.tolist()) == sorted(nodes.tolist())
    assert torch.equal(edges_of(out), GRAPH.edge_index[:, out.edge])
    inner = out.node[: sum(out.num_sampled_nodes[:2])]
    assert len(out.edge) == torch.isin(GRAPH.edge_index[1], inner).sum()
    assert out.num_sampled_nodes[0] == 2
    assert sum(out.num_sampled_nodes) == len(out.node)
    assert sum(out.num_sampled_edges) == len(out.edge)
    induced = sample(GRAPH, [-1, -1], [3, 7], subgraph_type="induced")
    assert len(induced.edge) == torch.isin(GRAPH.edge_index, nodes).all(0).sum()
    both = sample(GRAPH, [2, 2], [3, 7], subgraph_type="bidirectional")
    pairs = set(map(tuple, edges_of(both).t().tolist()))
    assert pairs == {(b, a) for a, b in pairs}


def test_so_many_neighbours_are_drawn_without_repetition() -> None:
    degree = GRAPH.edge_index[1].bincount(minlength=60)
    drawn = set()
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
    assert out.node[:2].tolist() == [3, 3]
    assert len(out.node) == 2 + 2 * neighbours
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
    assert out.node["v0"][:2].tolist() == [4, 9]
    assert out.num_sampled_edges[made.EDGES[0]][0] == 0  # its targets are of the other type
    for kind in made.EDGES:
        source, _, target = kind
        pairs = torch.stack([out.node[source][out.row[kind]], out.node[target][out.col[kind]]])
        assert torch.equal(pairs, data[kind].edge_index[:, out.edge[kind]])
    degree = data[made.EDGES[1]].edge_index[1].bincount(minlength=30)
    assert out.num_sampled_edges[made.EDGES[1]][0] == degree[[4, 9]].clamp(max=3).sum()
    with pytest.raises(NotImplementedError, match="starts from nodes"):
        NeighborSampler(data, fanouts).sample_from_edges(None)
