"""Loaders of graphs in batches of fixed sizes, and packing streams of graphs into them."""

import pickle

import pytest
import torch
import torch_geometric.transforms as transforms
from torch.utils.data import RandomSampler
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as PyGLoader

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.loaders import FORK
from helpers.wrapping import options
from poptorch_geometric import pyg_dataloader
from poptorch_geometric.collate import FixedSizeCollater
from poptorch_geometric.dataloader import DataLoader
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler

GRAPHS = made.graphs()


@pytest.mark.spec("geometric", 46, 47, 48, 49)
def test_the_batch_size_includes_the_padding_graph_and_the_rest_is_filled_with_it() -> None:
    loader = pg.FixedSizeDataLoader(made.graphs(20), batch_size=10, shuffle=True)
    assert (len(loader), loader.padded_batch_size) == (2, 10)
    assert loader.fixed_size_options.num_nodes == 37
    batches = list(loader)
    assert [int(batch.graphs_mask.sum()) for batch in batches] == [9, 9]
    assert made.shapes(batches[0]) == made.shapes(batches[1])
    assert len({y for batch in batches for y in batch.y[batch.graphs_mask].tolist()}) == 18
    with pytest.raises(AssertionError, match="must match"):
        pg.FixedSizeDataLoader(GRAPHS, batch_size=3, fixed_size_options=made.sizes())
    loader = pg.FixedSizeDataLoader(made.graphs(5), 4, drop_last=False)
    batches = list(loader)
    assert len(loader) == 2
    assert made.shapes(batches[0]) == made.shapes(batches[1])
    assert batches[1].graphs_mask.tolist() == [True, True, False, False]
    assert len(list(pg.FixedSizeDataLoader(made.graphs(5), 4))) == 1


@pytest.mark.spec("ops", 30)
@pytest.mark.spec("geometric", 46, 75)
def test_samples_come_in_order_with_padding_by_plain_loaders_too() -> None:
    plain = list(pyg_dataloader.FixedSizeDataLoader(GRAPHS, 4))
    assert [len(batch.to_data_list()) for batch in plain] == [4, 4, 4]
    for batches in (plain, list(pg.FixedSizeDataLoader(GRAPHS, batch_size=4))):
        assert len(batches) == 3
        for at, batch in enumerate(batches):
            assert batch.num_graphs == 4
            assert batch.y[:3].tolist() == [3 * at, 3 * at + 1, 3 * at + 2]
            assert batch.x.shape == (batch.num_nodes, 2) == (13, 2)
    assert batch.graphs_mask.tolist() == [True, True, True, False]


@pytest.mark.spec("geometric", 50, 51)
def test_what_loaders_and_their_subclasses_decide_themselves() -> None:
    class First(pg.FixedSizeDataLoader):
        def _create_collater(self, **collater_args):
            collate = super()._create_collater(**collater_args)
            return lambda samples: collate(samples[:1])

    assert next(iter(First(GRAPHS, 3))).y.tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match="collate_fn"):
        pg.FixedSizeDataLoader(GRAPHS, collate_fn=list)
    assert next(iter(DataLoader(GRAPHS, 2, collate_fn=list))).num_graphs == 2
    with pytest.raises(ValueError, match="incompatible"):
        pg.FixedSizeDataLoader(GRAPHS, 4, fixed_size_strategy=pg.FixedSizeStrategy.StreamPack,
                               batch_sampler=[[0]])  # fmt: skip
    with pytest.raises(NotImplementedError, match="Unknown fixed_size_strategy"):
        pg.FixedSizeDataLoader(GRAPHS, 4, fixed_size_strategy="all")
    with pytest.raises(poptorch.Error, match="cannot be assembled from smaller ones"):
        pg.FixedSizeDataLoader(GRAPHS, 4, mode=poptorch.DataLoaderMode.AsyncRebatched)


@pytest.mark.spec("geometric", 52)
def test_a_batch_sampler_decides_what_is_in_a_micro_batch() -> None:
    sampler = [[0, 5], [8], [1, 2, 3], [4]]
    loader = pg.FixedSizeDataLoader(GRAPHS, 4, batch_sampler=sampler, options=options(iterations=2))
    batches = list(loader)
    assert len(loader) == len(batches) == 2
    assert [b.y[b.graphs_mask].tolist() for b in batches] == [[0, 5, 8], [1, 2, 3, 4]]
    assert batches[0].x.shape == (26, 2)
    assert (batches[0].num_nodes, batches[0].num_graphs) == (13, 4)


@pytest.mark.spec("geometric", 63, 65)
@pytest.mark.parametrize("fixed", [False, True])
def test_iterations_multiply_the_first_dimension(fixed: bool) -> None:
    def loader(opts):
        if fixed:
            return pg.FixedSizeDataLoader(GRAPHS, 2, options=opts)
        return DataLoader([made.graph(3, at) for at in range(9)], 1, options=opts)

    one, three = list(loader(options())), list(loader(options(iterations=3)))
    assert (len(one), len(three)) == (9, 3)
    for at, batch in enumerate(three):
        parts = one[3 * at : 3 * at + 3]
        for key, (shape, dtype) in made.shapes(batch).items():
            small = made.shapes(parts[0])[key]
            assert (shape, dtype) == ((3 * small[0][0], *small[0][1:]), small[1])
        for name in ("x", "edge_index", "y", "ptr"):
            assert torch.equal(batch[name], torch.cat([part[name] for part in parts]))
        assert batch.num_nodes == parts[0].num_nodes
    assert isinstance(three[0], Batch)


@pytest.mark.spec("geometric", 63)
def test_batches_without_padding_are_torch_geometrics() -> None:
    loader = DataLoader(GRAPHS, 2, follow_batch=["x"], exclude_keys=["y"])
    theirs = PyGLoader(GRAPHS, 2, follow_batch=["x"], exclude_keys=["y"])
    for batch, expected in zip(loader, theirs, strict=False):
        assert made.same(batch, expected)
    plain = pyg_dataloader.DataLoader(GRAPHS, 2, follow_batch=["x"], exclude_keys=["y"])
    for batch, expected in zip(plain, theirs, strict=True):
        assert made.same(batch, expected)
        assert len(batch.to_data_list()) == expected.num_graphs


@pytest.mark.spec("geometric", 64)
@pytest.mark.parametrize("samples", [GRAPHS, made.heteros()], ids=["Data", "HeteroData"])
def test_torch_geometrics_own_padding_makes_one_shape(samples) -> None:
    edges = 6 if samples is GRAPHS else dict.fromkeys(made.EDGES, 6)
    nodes = 6 if samples is GRAPHS else dict.fromkeys(made.TYPES, 6)
    pad = transforms.Pad(max_num_nodes=nodes, max_num_edges=edges)
    batches = list(DataLoader([pad(sample) for sample in samples], 2))
    assert len({str(made.shapes(batch)) for batch in batches}) == 1


ASYNC = {"mode": poptorch.DataLoaderMode.Async, "async_options": FORK}


@pytest.mark.spec("geometric", 74)
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_workers": 2, "persistent_workers": True}, ASYNC])
def test_workers_load_the_same_batches(settings) -> None:
    opts = options(iterations=2)
    expected = list(pg.FixedSizeDataLoader(GRAPHS, 3, options=opts))
    loader = pg.FixedSizeDataLoader(GRAPHS, 3, options=opts, **settings)
    for _ in range(2):
        assert len(expected) == 2
        for batch, theirs in zip(loader, expected, strict=True):
            assert made.same(batch, theirs)
            assert (batch.num_nodes, batch.num_graphs) == (theirs.num_nodes, theirs.num_graphs)
    loader.terminate()


def test_batches_and_their_classes_can_be_pickled() -> None:
    for batch in (next(iter(pg.FixedSizeDataLoader(GRAPHS, 3))),
                  next(iter(pg.FixedSizeDataLoader(made.heteros(), 3)))):  # fmt: skip
        again = pickle.loads(pickle.dumps(batch))
        assert type(again) is type(batch)
        assert pickle.loads(pickle.dumps(type(batch))) is type(batch)
        assert made.same(again, batch)
        assert again.num_graphs == 3


def test_several_processes_share_the_samples() -> None:
    opts = options()
    opts.Distributed.configureProcessId(1, 2)
    assert [b.y[0].item() for b in pg.FixedSizeDataLoader(GRAPHS, 2, options=opts)] == [4, 5, 6, 7]
    with pytest.raises(poptorch.Error, match="mutually exclusive with auto_distributed"):
        pg.FixedSizeDataLoader(GRAPHS, 4, options=opts, batch_sampler=[[0]])


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
    packed = loader(GRAPHS[:4], 12 - less[0], 12 - less[1], 5 - less[2])  # 11 nodes and edges
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
