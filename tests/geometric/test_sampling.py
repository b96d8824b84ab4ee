"""Neighbours of seeds, drawn by poptorch_geometric's own sampler."""

from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

import poptorch
from helpers import graphs as made
from poptorch_geometric._sampling import NeighborSampler

GRAPH = made.random_graph()


def sample(
    data: Data,
    fanouts: Any,
    seeds: list[int],
    *,
    time: torch.Tensor | None = None,
    input_type: str | None = None,
    **settings: Any,
) -> Any:
    """Draw the neighbourhood of ``seeds``: ``fanouts`` says how many neighbours in each hop."""
    nodes = torch.tensor(seeds)
    given = NodeSamplerInput(torch.arange(len(nodes)), nodes, time, input_type)
    return NeighborSampler(data, fanouts, **settings).sample_from_nodes(given)


def edges_of(out: SamplerOutput) -> torch.Tensor:
    """The sampled edges in numbers of the whole graph."""
    return torch.stack([out.node[out.row], out.node[out.col]])


ALL_OF_TWO_HOPS = [-1, -1]


@pytest.fixture(scope="module")
def whole() -> SamplerOutput:
    """All neighbours of the nodes 3 and 7, and all neighbours of these."""
    return sample(GRAPH, ALL_OF_TWO_HOPS, [3, 7])


@pytest.fixture(scope="module")
def nodes_within_two_hops() -> torch.Tensor:
    """Return the result of torch_geometric for the same seeds."""
    nodes, _, _, _ = k_hop_subgraph([3, 7], 2, GRAPH.edge_index)
    return nodes


def test_seeds_come_first(whole: SamplerOutput) -> None:
    assert whole.node[:2].tolist() == [3, 7]


def test_all_neighbours_are_the_whole_neighbourhood(
    whole: SamplerOutput, nodes_within_two_hops: torch.Tensor
) -> None:
    assert sorted(whole.node.tolist()) == sorted(nodes_within_two_hops.tolist())


def test_sampled_edges_are_edges_of_the_graph_by_their_number(whole: SamplerOutput) -> None:
    assert torch.equal(edges_of(whole), GRAPH.edge_index[:, whole.edge])


def test_all_edges_into_nodes_before_the_last_hop_are_sampled(whole: SamplerOutput) -> None:
    before_last_hop = whole.node[: sum(whole.num_sampled_nodes[:2])]

    assert len(whole.edge) == torch.isin(GRAPH.edge_index[1], before_last_hop).sum()


def test_nodes_and_edges_are_counted_hop_by_hop(whole: SamplerOutput) -> None:
    seeds = whole.num_sampled_nodes[0]

    assert seeds == 2
    assert sum(whole.num_sampled_nodes) == len(whole.node)
    assert sum(whole.num_sampled_edges) == len(whole.edge)


def test_an_induced_subgraph_has_all_edges_between_its_nodes(
    nodes_within_two_hops: torch.Tensor,
) -> None:
    induced = sample(GRAPH, ALL_OF_TWO_HOPS, [3, 7], subgraph_type="induced")

    inside = torch.isin(GRAPH.edge_index, nodes_within_two_hops).all(0)
    assert len(induced.edge) == inside.sum()


def test_a_bidirectional_subgraph_has_every_edge_in_both_directions() -> None:
    both = sample(GRAPH, [2, 2], [3, 7], subgraph_type="bidirectional")

    pairs = set(map(tuple, edges_of(both).t().tolist()))
    assert pairs
    assert pairs == {(target, source) for source, target in pairs}


@pytest.fixture(scope="module")
def draws() -> list[SamplerOutput]:
    """Twenty times three neighbours of every node of the graph."""
    torch.manual_seed(0)
    return [sample(GRAPH, [3], [*range(60)]) for _ in range(20)]


def test_a_fanout_draws_no_more_neighbours_than_there_are(draws: list[SamplerOutput]) -> None:
    degrees = GRAPH.edge_index[1].bincount(minlength=60)

    for out in draws:
        assert torch.equal(out.col.bincount(minlength=60), degrees.clamp(max=3))


def test_no_neighbour_is_drawn_twice(draws: list[SamplerOutput]) -> None:
    for out in draws:
        assert len(out.edge.unique()) == len(out.edge)
        assert torch.equal(edges_of(out), GRAPH.edge_index[:, out.edge])


def test_every_draw_is_another_one(draws: list[SamplerOutput]) -> None:
    drawn = {edge for out in draws for edge in out.edge.tolist()}

    assert len(drawn) > 0.9 * GRAPH.num_edges


def test_neighbours_drawn_with_replacement_may_come_twice() -> None:
    more = sample(GRAPH, [9], [0], replace=True)

    assert len(more.edge) == 9
    assert len(more.edge.unique()) < 9


@pytest.fixture
def star() -> Data:
    """Edges from the nodes 1 to 4 to the node 0, of the weights 0, 1, 0 and 3."""
    return Data(
        edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]),
        num_nodes=5,
        weight=torch.tensor([0.0, 1.0, 0.0, 3.0]),
    )


@pytest.mark.parametrize("replace", [False, True])
def test_neighbours_are_drawn_in_proportion_to_their_weights(star: Data, replace: bool) -> None:
    """Node 4 is expected in 150 of 200 draws, with a standard deviation of 6."""
    counts = torch.zeros(5)

    for _ in range(200):
        out = sample(star, [1], [0], weight_attr="weight", replace=replace)
        counts[out.node[out.row]] += 1

    assert counts[[0, 1, 3]].tolist() == [0, 0, 0]
    assert 110 < counts[4] < 185


def test_weights_that_do_not_exist_are_refused(star: Data) -> None:
    with pytest.raises(poptorch.Error, match="attribute by which edges are sampled"):
        sample(star, [1], [0], weight_attr="missing")


@pytest.fixture(scope="module")
def disjoint() -> SamplerOutput:
    """All neighbours of the node 3, which is given as a seed twice."""
    return sample(GRAPH, [-1], [3, 3], disjoint=True)


def test_disjoint_seeds_have_a_tree_each(disjoint: SamplerOutput) -> None:
    neighbours = int((GRAPH.edge_index[1] == 3).sum())

    assert disjoint.node[:2].tolist() == [3, 3]
    assert len(disjoint.node) == 2 * (1 + neighbours)
    assert disjoint.batch.bincount().tolist() == [1 + neighbours, 1 + neighbours]


def test_edges_of_disjoint_seeds_stay_in_their_tree(disjoint: SamplerOutput) -> None:
    assert torch.equal(disjoint.batch[disjoint.row], disjoint.batch[disjoint.col])


@pytest.fixture
def dated() -> Data:
    """Edges into the node 0, whose time is 2, from the nodes 1 to 4 of the times 0, 1, 2, 3.

    The edges have times of their own: 5, 6, 7 and 8.
    """
    return Data(
        edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]),
        num_nodes=5,
        time=torch.tensor([2, 0, 1, 2, 3]),
        when=torch.tensor([5, 6, 7, 8]),
    )


def test_neighbours_are_not_later_than_their_seed(dated: Data) -> None:
    out = sample(dated, [-1], [0], time_attr="time")

    assert sorted(out.node.tolist()) == [0, 1, 2, 3]


def test_the_strategy_last_takes_the_latest_neighbour(dated: Data) -> None:
    out = sample(dated, [1], [0], time_attr="time", temporal_strategy="last")

    assert out.node.tolist() == [0, 3]


def test_a_seed_can_get_its_own_time(dated: Data) -> None:
    out = sample(dated, [-1], [0], time=torch.tensor([1]), time_attr="time")

    assert sorted(out.node.tolist()) == [0, 1, 2]


def test_times_of_edges_count_if_they_are_named(dated: Data) -> None:
    out = sample(dated, [-1], [0], time=torch.tensor([6]), time_attr="when")

    assert sorted(out.node.tolist()) == [0, 1, 2]


def test_times_of_edges_need_the_time_of_every_seed(dated: Data) -> None:
    with pytest.raises(poptorch.Error, match="needs the time of every seed"):
        sample(dated, [-1], [0], time_attr="when")


def test_an_unknown_temporal_strategy_is_refused(dated: Data) -> None:
    with pytest.raises(poptorch.Error, match="temporal_strategy"):
        sample(dated, [-1], [0], temporal_strategy="first")


TYPED = made.hetero_graph()
FANOUTS = {made.EDGES[0]: [2, 1], made.EDGES[1]: [3, 2], made.EDGES[2]: [1, 0]}
"""How many neighbours of each type of edge are drawn in the first and in the second hop."""


@pytest.fixture(scope="module")
def typed() -> Any:
    """Neighbours of the nodes 4 and 9 of the type v0."""
    torch.manual_seed(0)
    return sample(TYPED, FANOUTS, [4, 9], input_type="v0")


def test_seeds_of_a_type_come_first_in_their_type(typed: Any) -> None:
    assert typed.node["v0"][:2].tolist() == [4, 9]


@pytest.mark.parametrize("kind", made.EDGES, ids=lambda kind: kind[1])
def test_sampled_edges_of_each_type_are_edges_of_the_graph(
    typed: Any, kind: tuple[str, str, str]
) -> None:
    source, _, target = kind

    pairs = torch.stack([typed.node[source][typed.row[kind]], typed.node[target][typed.col[kind]]])

    assert torch.equal(pairs, TYPED[kind].edge_index[:, typed.edge[kind]])


def test_each_type_of_edges_has_its_own_fanout(typed: Any) -> None:
    into_v1, into_v0, _ = made.EDGES
    degrees = TYPED[into_v0].edge_index[1].bincount(minlength=30)

    assert typed.num_sampled_edges[into_v1][0] == 0  # the seeds are of the type v0
    assert typed.num_sampled_edges[into_v0][0] == degrees[[4, 9]].clamp(max=3).sum()


def test_sampling_from_edges_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="can only start from nodes"):
        NeighborSampler(TYPED, FANOUTS).sample_from_edges(None)
