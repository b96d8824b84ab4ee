"""Sizes of batches, and packing streams of graphs into them."""

import pytest
import torch
from torch.utils.data import RandomSampler
from torch_geometric.data import Batch

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from poptorch_geometric.collate import FixedSizeCollater
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler


@pytest.mark.spec("geometric", 1)
def test_the_names_are_there() -> None:
    assert pg.FixedSizeStrategy.PadToMax.value == 0
    assert [each.value for each in pg.OverSizeStrategy] == [0, 1, 2, 3, 4]
    assert set(pg.__all__) == {
        "FixedSizeDataLoader", "FixedSizeOptions", "FixedSizeStrategy", "OverSizeStrategy",
        "TrainingStepper", "set_aggregation_dim_size", "make_exclude_keys", "PyGArgsParser",
        "__version__",
    }  # fmt: skip
    assert pg.__version__ == poptorch.__version__


@pytest.mark.spec("geometric", 2, 3, 4, 5, 6, 7)
def test_defaults_limits_and_sizes_by_type() -> None:
    sizes = pg.FixedSizeOptions(10)
    assert (sizes.num_edges, sizes.num_graphs) == (90, 2)  # all pairs of nodes
    assert pg.FixedSizeOptions(10, 0).num_edges == 90
    assert pg.FixedSizeOptions({"a": 3, "b": 2}).num_edges == 20
    assert (sizes.node_pad_value, sizes.edge_pad_value, sizes.graph_pad_value) == (0.0, 0.0, 0.0)
    assert sizes.pad_graph_defaults == {}
    assert repr(pg.FixedSizeOptions(5, node_pad_value=3).node_pad_value) == "3.0"
    kinds = ("num_{}s", "{}_pad_value")
    names = [name.format(kind) for kind in ("node", "edge", "graph") for name in kinds]
    assert all(f"{name}=" in repr(sizes) for name in [*names, "pad_graph_defaults"])
    with pytest.raises(ValueError, match="at least 2"):  # one place is for padding
        pg.FixedSizeOptions(5, num_graphs=1)
    with pytest.raises(ValueError, match="at least 2"):
        pg.FixedSizeOptions.from_dataset(made.graphs(), 1)
    sizes = pg.FixedSizeOptions({"a": 5, "b": 6}, 7)
    assert not sizes.is_hetero()
    assert sizes.to_hetero(["a", "b"], ["e", "f"]) is sizes
    assert sizes.is_hetero()
    assert (sizes.num_nodes, sizes.num_edges) == ({"a": 5, "b": 6}, {"e": 7, "f": 7})
    assert (sizes.total_num_nodes, sizes.total_num_edges) == (11, 14)


@pytest.mark.spec("geometric", 8, 9, 10)
def test_sizes_of_a_data_set_and_of_a_loader() -> None:
    graphs = made.graphs()
    sizes = pg.FixedSizeOptions.from_dataset(graphs, 10)
    assert (sizes.num_nodes, sizes.num_edges, sizes.num_graphs) == (37, 37, 10)
    assert pg.FixedSizeOptions.from_dataset(graphs, 10, sample_limit=1).num_nodes == 19
    by_type = pg.FixedSizeOptions.from_dataset(made.heteros(), 3)
    assert by_type.num_nodes == {"v0": 9, "v1": 9}
    assert by_type.num_edges == dict.fromkeys(made.EDGES, 9)
    with pytest.raises(poptorch.Error, match="is empty"):
        pg.FixedSizeOptions.from_dataset([], 2)
    batches = [Batch.from_data_list(graphs[:3]), Batch.from_data_list(graphs[:2])]
    sizes = pg.FixedSizeOptions.from_loader(batches)
    assert (sizes.num_nodes, sizes.num_edges, sizes.num_graphs) == (10, 10, 4)
    reads = []

    class Loader:
        def __iter__(self):
            for batch in batches:
                reads.append(batch)
                yield batch

    assert pg.FixedSizeOptions.from_loader(Loader(), sample_limit=5).num_graphs == 4
    assert len(reads) == 5
    torch.manual_seed(0)
    given = {"batch_size": 4, "fixed_size_options": pg.FixedSizeOptions(60, 300)}
    loader = FixedSizeNeighborLoader(made.random_graph(), [3, 2], **given)
    assert pg.FixedSizeOptions.from_loader(loader.neighbour_loader, 20).num_graphs == 2
    assert pg.FixedSizeOptions.from_loader(made.heteros()).num_nodes == {"v0": 5, "v1": 5}


GRAPHS = made.graphs()
PACK = pg.FixedSizeStrategy.StreamPack


def loader(graphs, nodes: int, edges: int, count: int, **others) -> pg.FixedSizeDataLoader:
    others |= {"fixed_size_options": made.sizes(nodes, edges, count), "fixed_size_strategy": PACK}
    return pg.FixedSizeDataLoader(graphs, count, **others)


@pytest.mark.spec("geometric", 55, 60, 62)
def test_packing_takes_as_many_as_fit_in_order() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3, 8, 8)
    # Graphs have 2, 3, 4, 2, ... nodes: the third would make 9.
    assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert len(sampler) == 5
    assert list(StreamPackingSampler(GRAPHS, 3, 8, 8, base_sampler=[2, 1, 0])) == [[2, 1], [0]]
    with pytest.raises(NotImplementedError, match="random order"):
        len(StreamPackingSampler(GRAPHS, 3, 8, 8, base_sampler=RandomSampler(GRAPHS)))
    batches = list(loader(GRAPHS, 9, 9, 4))
    assert [int(batch.graphs_mask.sum()) for batch in batches] == [2, 2, 2, 2, 1]
    assert [y for batch in batches for y in batch.y[batch.graphs_mask].tolist()] == [*range(9)]
    mixed = loader(GRAPHS, 9, 9, 4, shuffle=True)
    shuffled = [y for batch in mixed for y in batch.y[batch.graphs_mask].tolist()]
    assert shuffled != [*range(9)]
    assert sorted(shuffled) == [*range(9)]
    collate = FixedSizeCollater(made.sizes(9, 9, 4))
    plain = torch.utils.data.DataLoader(GRAPHS, batch_sampler=sampler, collate_fn=collate)
    assert [batch.num_nodes for batch in plain] == [9] * 5


@pytest.mark.spec("geometric", 53, 54, 59)
@pytest.mark.parametrize("less", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_batch_just_large_enough_for_free_places_too(less: tuple[int, int, int]) -> None:
    graphs = GRAPHS[:4]  # 11 nodes and edges
    packed = loader(graphs, 12 - less[0], 12 - less[1], 5 - less[2])
    assert len(list(packed)) == 1 + any(less)
    assert len(packed) == 1 + any(less)
    # Two graphs of 4 would leave no node for the third.
    fours = [made.graph(4), made.graph(4)]
    assert list(StreamPackingSampler(fours, 3, 8, 99)) == [[0], [1]]
    assert list(StreamPackingSampler(fours, 3, 99, 8)) == [[0], [1]]
    assert list(StreamPackingSampler(fours, 2, 8, 8)) == [[0, 1]]


@pytest.mark.spec("geometric", 56, 57)
def test_samples_that_are_too_large() -> None:
    graphs = [made.graph(2, 0), made.graph(9, 1), made.graph(3, 2)]
    with pytest.raises(RuntimeError) as failure:
        list(StreamPackingSampler(graphs, 2, 8, 8))
    failure.match("too small to fit in the single sample")
    failure.match("sample 1 has nodes {None: 9}")
    assert list(StreamPackingSampler(graphs, 2, 8, 8, allow_skip_data=True)) == [[0, 2]]
    assert list(StreamPackingSampler([graphs[1]], 2, 8, 8, allow_skip_data=True)) == []
    strategy = pg.OverSizeStrategy
    with pytest.raises(RuntimeError, match="too small to fit"):
        list(loader(graphs, 9, 9, 3, over_size_strategy=strategy.Error))
    (batch,) = loader(graphs, 9, 9, 3, over_size_strategy=strategy.Skip)
    assert batch.y[batch.graphs_mask].tolist() == [0, 2]
    # One that is to be trimmed is a micro-batch of its own, and closes no other.
    trimmed = list(loader(graphs, 9, 9, 3, over_size_strategy=strategy.TrimNodesAndEdges))
    assert [each.y[each.graphs_mask].tolist() for each in trimmed] == [[1], [0, 2]]
    assert {each.num_nodes for each in trimmed} == {9}


@pytest.mark.spec("geometric", 58, 61)
def test_arguments_can_be_read_and_have_limits() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3)
    assert (sampler.max_num_graphs, sampler.max_num_nodes, sampler.max_num_edges) == (3, 12, 12)
    for arguments in ((None,), (0,), (3, 2), (3, 9, 2)):
        with pytest.raises(ValueError):
            StreamPackingSampler(GRAPHS, *arguments)
    with pytest.raises(ValueError, match="no samples"):
        StreamPackingSampler(GRAPHS, 3, base_sampler=[])


def test_graphs_with_types_are_counted_by_type() -> None:
    graphs = [made.hetero(4, 1), made.hetero(4, 1), made.hetero(1, 4)]
    sampler = StreamPackingSampler(graphs, 2, {"v0": 5, "v1": 9}, dict.fromkeys(made.EDGES, 9))
    assert list(sampler) == [[0], [1, 2]]
    assert list(StreamPackingSampler(graphs, 2, 10, 30)) == [[0, 1], [2]]
    assert [int(batch.graphs_mask.sum()) for batch in loader(graphs, 9, 12, 3)] == [2, 1]
