"""Packing: as many graphs as fit go into a micro-batch, in order."""

import pytest
import torch
from torch.utils.data import RandomSampler
from torch_geometric.data import Data, HeteroData

import poptorch_geometric as pg
from helpers import graphs as made
from poptorch_geometric.collate import FixedSizeCollater
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler

GRAPHS = made.graphs()
"""Nine rings of 2, 3, 4, 2, 3, 4, 2, 3, 4 nodes; ``y`` is a graph's place in this list."""


def packing_loader(
    graphs: list[Data] | list[HeteroData], nodes: int, edges: int, count: int, **others: object
) -> pg.FixedSizeDataLoader:
    """A loader that packs ``graphs`` into micro-batches of these sizes."""
    return pg.FixedSizeDataLoader(
        graphs,
        count,
        fixed_size_options=made.sizes(nodes, edges, count),
        fixed_size_strategy=pg.FixedSizeStrategy.StreamPack,
        **others,
    )


def real_samples(loader: pg.FixedSizeDataLoader) -> list[list[int]]:
    """The ``y`` of each batch's graphs, without padding."""
    return [batch.y[batch.graphs_mask].tolist() for batch in loader]


@pytest.fixture
def pairs() -> StreamPackingSampler:
    """Packs two graphs at a time: with the third there would be 9 nodes, and 8 fit."""
    return StreamPackingSampler(GRAPHS, 3, 8, 8)


def test_packing_takes_as_many_as_fit_in_order(pairs: StreamPackingSampler) -> None:
    assert list(pairs) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.spec("geometric", 60)
def test_the_length_is_the_number_of_micro_batches(pairs: StreamPackingSampler) -> None:
    assert len(pairs) == 5


def test_a_base_sampler_decides_the_order_and_the_samples() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3, 8, 8, base_sampler=[2, 1, 0])

    assert list(sampler) == [[2, 1], [0]]


@pytest.mark.spec("geometric", 60)
def test_a_random_order_has_no_length() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3, 8, 8, base_sampler=RandomSampler(GRAPHS))

    with pytest.raises(NotImplementedError, match="random order"):
        len(sampler)


@pytest.mark.spec("geometric", 55)
def test_a_packing_loader_yields_each_sample_once_and_in_order() -> None:
    loader = packing_loader(GRAPHS, 9, 9, 4)

    assert real_samples(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_a_shuffling_packing_loader_yields_each_sample_once_in_another_order() -> None:
    loader = packing_loader(GRAPHS, 9, 9, 4, shuffle=True)

    samples = [sample for batch in real_samples(loader) for sample in batch]

    assert samples != [*range(9)]
    assert sorted(samples) == [*range(9)]


@pytest.mark.spec("geometric", 62)
def test_the_sampler_is_a_batch_sampler_of_a_plain_torch_loader(
    pairs: StreamPackingSampler,
) -> None:
    collate = FixedSizeCollater(made.sizes(9, 9, 4))
    plain = torch.utils.data.DataLoader(GRAPHS, batch_sampler=pairs, collate_fn=collate)

    assert [batch.num_nodes for batch in plain] == [9] * 5


@pytest.mark.spec("geometric", 53, 54)
@pytest.mark.parametrize(
    "nodes, edges, count, batches",
    [
        (12, 12, 5, 1),
        (11, 12, 5, 2),
        (12, 11, 5, 2),
        (12, 12, 4, 2),
    ],
    ids=["just enough", "one node less", "one edge less", "one graph less"],
)
def test_a_batch_needs_room_for_all_samples_and_one_graph_node_and_edge_more(
    nodes: int, edges: int, count: int, batches: int
) -> None:
    four = GRAPHS[:4]  # 11 nodes and 11 edges

    loader = packing_loader(four, nodes, edges, count)

    assert len(list(loader)) == batches
    assert len(loader) == batches


@pytest.mark.spec("geometric", 59)
@pytest.mark.parametrize(
    "count, nodes, edges, expected",
    [
        (3, 8, 99, [[0], [1]]),
        (3, 99, 8, [[0], [1]]),
        (2, 8, 8, [[0, 1]]),
    ],
    ids=["no node left", "no edge left", "no place left"],
)
def test_every_free_place_needs_a_node_and_an_edge(
    count: int, nodes: int, edges: int, expected: list[list[int]]
) -> None:
    """Two rings of 4 nodes fill 8 nodes and leave none for the padding in a third place."""
    fours = [made.graph(4), made.graph(4)]

    assert list(StreamPackingSampler(fours, count, nodes, edges)) == expected


TOO_LARGE = [made.graph(2, 0), made.graph(9, 1), made.graph(3, 2)]
"""The second one does not fit into 8 nodes."""


def test_a_sample_that_is_too_large_is_an_error_that_says_which() -> None:
    with pytest.raises(RuntimeError) as failure:
        list(StreamPackingSampler(TOO_LARGE, 2, 8, 8))

    failure.match("too small to fit in the single sample")
    failure.match("sample 1 has nodes {None: 9}")


def test_samples_that_are_too_large_can_be_skipped() -> None:
    sampler = StreamPackingSampler(TOO_LARGE, 2, 8, 8, allow_skip_data=True)

    assert list(sampler) == [[0, 2]]


def test_nothing_is_left_if_all_samples_are_skipped() -> None:
    sampler = StreamPackingSampler([TOO_LARGE[1]], 2, 8, 8, allow_skip_data=True)

    assert list(sampler) == []


@pytest.mark.spec("geometric", 57)
def test_the_strategy_error_raises_while_iterating_only() -> None:
    loader = packing_loader(TOO_LARGE, 9, 9, 3, over_size_strategy=pg.OverSizeStrategy.Error)

    with pytest.raises(RuntimeError, match="too small to fit"):
        list(loader)


@pytest.mark.spec("geometric", 56)
def test_the_strategy_skip_leaves_out_samples_that_are_too_large() -> None:
    loader = packing_loader(TOO_LARGE, 9, 9, 3, over_size_strategy=pg.OverSizeStrategy.Skip)

    assert real_samples(loader) == [[0, 2]]


def test_a_trimmed_sample_is_alone_in_its_micro_batch_and_closes_no_other() -> None:
    trim = pg.OverSizeStrategy.TrimNodesAndEdges
    loader = packing_loader(TOO_LARGE, 9, 9, 3, over_size_strategy=trim)

    assert real_samples(loader) == [[1], [0, 2]]
    assert [batch.num_nodes for batch in loader] == [9, 9]


@pytest.mark.spec("geometric", 61)
def test_limits_can_be_read_and_default_to_the_largest_graphs() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3)

    assert sampler.max_num_graphs == 3
    assert sampler.max_num_nodes == 3 * 4
    assert sampler.max_num_edges == 3 * 4


@pytest.mark.spec("geometric", 58)
@pytest.mark.parametrize(
    "limits",
    [(None,), (0,), (3, 2), (3, 9, 2)],
    ids=["no graphs given", "zero graphs", "fewer nodes", "fewer edges"],
)
def test_limits_below_the_number_of_graphs_are_refused(limits: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError):
        StreamPackingSampler(GRAPHS, *limits)


def test_a_base_sampler_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        StreamPackingSampler(GRAPHS, 3, base_sampler=[])


@pytest.fixture
def typed_graphs() -> list[HeteroData]:
    """Graphs of 4 and 1, 4 and 1, 1 and 4 nodes of the types v0 and v1."""
    return [made.hetero(4, 1), made.hetero(4, 1), made.hetero(1, 4)]


def test_limits_by_type_are_counted_by_type(typed_graphs: list[HeteroData]) -> None:
    limits = {"v0": 5, "v1": 9}

    sampler = StreamPackingSampler(typed_graphs, 2, limits, dict.fromkeys(made.EDGES, 9))

    assert list(sampler) == [[0], [1, 2]]


def test_plain_limits_are_counted_over_all_types(typed_graphs: list[HeteroData]) -> None:
    assert list(StreamPackingSampler(typed_graphs, 2, 10, 30)) == [[0, 1], [2]]


def test_a_packing_loader_gives_every_type_the_full_number(
    typed_graphs: list[HeteroData],
) -> None:
    loader = packing_loader(typed_graphs, 9, 12, 3)

    assert [int(batch.graphs_mask.sum()) for batch in loader] == [2, 1]
