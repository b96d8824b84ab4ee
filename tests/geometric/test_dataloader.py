"""Batches of graphs of one size: what is padded, what becomes of each, and loaders of them."""

import copy
import pickle

import pytest
import torch
import torch_geometric.transforms as transforms
from torch.utils.data import RandomSampler
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.loader import DataLoader as PyGLoader

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.loaders import FORK
from helpers.wrapping import Calling, infer, options, unchecked
from poptorch_geometric import pyg_dataloader
from poptorch_geometric.collate import CombinedBatchingCollater, FixedSizeCollater
from poptorch_geometric.common import DataBatch, HeteroDataBatch
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
    assert (len(loader), made.shapes(batches[0])) == (2, made.shapes(batches[1]))
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
    assert (list(sampler), len(sampler)) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8]], 5)
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
    assert (len(list(packed)), len(packed)) == (1 + any(less), 1 + any(less))
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


@pytest.mark.spec("geometric", 11, 12, 13, 14, 16, 19, 31, 33, 34)
@pytest.mark.parametrize("of_nodes", [False, True])
def test_padding_is_behind_what_is_real(of_nodes: bool) -> None:
    samples = [made.graph(3, 0, of_nodes), made.graph(4, 1, of_nodes)]
    sizes = made.sizes(node_pad_value=-1, edge_pad_value=-2, graph_pad_value=-3)
    batch = FixedSizeCollater(sizes, add_masks_to_batch=True)(samples)
    assert type(batch) is DataBatch
    assert (batch.num_nodes, batch.num_edges, batch.num_graphs) == (14, 16, 4)
    assert torch.equal(batch.x[:7], torch.cat([s.x for s in samples]))
    assert (batch.x[7:] == -1).all()
    assert batch.place.dtype == torch.int64
    assert (batch.place[7:] == -1).all()
    assert (batch.edge_attr[7:] == -2).all()
    expected = torch.cat([s.y for s in samples])
    assert batch.y.shape == ((14,) if of_nodes else (4,))
    assert torch.equal(batch.y[: len(expected)], expected)
    assert (batch.y[len(expected) :] == (-1 if of_nodes else -3)).all()
    assert (batch.edge_index[:, 7:] >= 7).all()
    assert batch.edge_index.max() < 14
    assert batch.edge_index[:, 7:].tolist() == [[7] * 5 + [11] * 4] * 2
    assert batch.ptr.tolist() == [0, 3, 7, 11, 14]
    assert batch.batch.tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 3
    for mask, count in ((batch.graphs_mask, 2), (batch.nodes_mask, 7), (batch.edges_mask, 7)):
        assert (mask.dtype, mask.sum()) == (torch.bool, count)
        assert mask[:count].all()


@pytest.mark.spec("geometric", 15, 17, 18)
def test_padding_is_in_no_split_and_copies_what_is_no_tensor() -> None:
    sample = made.graph(3)
    sample.val_mask = sample.test_mask = sample.train_mask = sample.other = torch.ones(3).bool()
    batch = FixedSizeCollater(made.sizes(9, 9, 2, node_pad_value=1))([sample])
    for name in ("train_mask", "val_mask", "test_mask"):
        assert batch[name].tolist() == [True] * 3 + [False] * 6
    assert batch.other.all()
    sample.name, sample.number, sample.things = "a", 2, ["b", 1]
    batch = FixedSizeCollater(made.sizes(9, 9, 2))([sample])
    assert (batch.name, batch.things) == (["a", "a"], [["b", 1], ["b", 1]])
    assert batch.number.tolist() == [2, 2]
    defaults = {"name": "pad", "number": 3}
    batch = FixedSizeCollater(made.sizes(9, 9, 2, pad_graph_defaults=defaults))([sample])
    assert (batch.name, batch.number.tolist()) == (["a", "pad"], [2, 3])


@pytest.mark.spec("geometric", 20)
def test_all_samples_decide_what_is_of_nodes_of_edges_and_of_graphs() -> None:
    wrong = made.graph(3)
    wrong.y = torch.zeros(2)
    with pytest.raises(AssertionError, match="Incorrect input data"):
        FixedSizeCollater(made.sizes())([wrong])
    # The first alone could be either.
    assert FixedSizeCollater(made.sizes())([made.graph(1)]).y.shape == (4,)
    both = [made.graph(1, of_nodes=True), made.graph(3, of_nodes=True)]
    assert FixedSizeCollater(made.sizes())(both).y.shape == (14,)
    samples = [made.graph(3), made.graph(2)]
    samples[0].feature, samples[1].feature = torch.ones(3), torch.ones(3)  # three of each graph
    for sample in samples:
        sample.kind = torch.ones(len(sample.x) + 1)
        sample.edge_index = torch.cat([sample.edge_index, sample.edge_index[:, :1]], dim=1)
        sample.edge_attr = torch.ones(sample.num_edges, 1)
    batch = FixedSizeCollater(made.sizes(9, 12, 3))(samples)
    assert (batch.feature.shape, batch.feature[6:].tolist()) == ((9,), [0, 0, 0])
    assert batch.kind.shape == (12,)


@pytest.mark.spec("geometric", 21, 45)
def test_follow_batch_and_exclude_keys_are_torch_geometrics() -> None:
    keys = pg.make_exclude_keys(("x", "y"), GRAPHS[0])
    assert isinstance(keys, tuple)
    assert set(keys) == {"place", "edge_index", "edge_attr"}
    collate = FixedSizeCollater(made.sizes(), follow_batch=["x"], exclude_keys=["edge_attr"])
    batch = collate(GRAPHS[:2])
    assert torch.equal(batch.x_batch, batch.batch)
    assert "edge_attr" not in batch


@pytest.mark.spec("geometric", 22)
def test_what_is_no_list_of_good_graphs_of_one_class_is_refused() -> None:
    collate = FixedSizeCollater(made.sizes())
    with pytest.raises(TypeError, match="Expected list, got tuple"):
        collate(tuple(GRAPHS[:2]))
    with pytest.raises(AssertionError, match="one class"):
        collate([GRAPHS[0], made.hetero()])
    with pytest.raises(poptorch.Error, match="no graph to make a batch of"):
        collate([])
    lacking = made.graph(3)
    del lacking.edge_attr
    with pytest.raises(KeyError) as failure:
        collate([GRAPHS[0], lacking])
    assert "graph 1 has no 'edge_attr'" in str(failure.value)
    for bad in (3, -1):
        outside = made.graph(3)
        outside.edge_index = torch.tensor([[0, 1, bad], [0, 1, 2]])
        with pytest.raises(poptorch.Error, match="An edge joins a node that the graph does not"):
            collate([outside])
    assert collate([made.graph(0), made.graph(3)]).ptr.tolist() == [0, 0, 3, 9, 14]
    alone = Data(x=torch.ones(3, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
    assert collate([alone]).num_edges == 16


@pytest.mark.spec("geometric", 23, 24)
@pytest.mark.parametrize("samples, sizes, phrase", [
    (GRAPHS[:3], (99, 99, 2), r"number of graphs\n.*3 samples \+ 1 padding graph"),
    (GRAPHS[:2], (4, 99, 3), "enough space for the number of nodes.*\n.*5 nodes, where 4 fit"),
    (GRAPHS[:2], (9, 4, 3), "enough space for the number of edges"),
    (GRAPHS[:2], (9, 9, 2), "cannot create additional graphs to pad nodes and edges"),
    (GRAPHS[:2], (5, 9, 3), "no padding node left"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(samples, sizes, phrase: str) -> None:
    with pytest.raises(RuntimeError) as failure:
        FixedSizeCollater(made.sizes(*sizes))(samples)
    failure.match(phrase)
    failure.match("Fix:")


@pytest.mark.spec("geometric", 24, 33)
def test_exactly_full_batches_need_no_padding() -> None:
    batch = FixedSizeCollater(made.sizes(5, 5, 2), True)(GRAPHS[:2])
    assert batch.nodes_mask.all()
    assert batch.graphs_mask.all()
    # Free places without nodes are graphs nevertheless.
    batch = FixedSizeCollater(made.sizes(5, 5, 4), True)(GRAPHS[:2])
    assert (batch.num_graphs, batch.ptr.tolist()) == (4, [0, 2, 5, 5, 5])
    # Only padding graphs with nodes get edges.
    batch = FixedSizeCollater(made.sizes(6, 9, 4))(GRAPHS[:2])
    assert batch.edge_index[:, 5:].tolist() == [[5] * 4] * 2


@pytest.mark.spec("geometric", 25, 29, 32)
def test_trimming_nodes_keeps_one_of_each_sample() -> None:
    samples = [made.graph(9, 0), made.graph(2, 1), made.graph(0, 2)]
    for _ in range(10):
        batch = FixedSizeCollater(made.sizes(5, 20, 4), True, trim_nodes=True)(samples)
        assert batch.num_nodes == 5
        left = int(batch.nodes_mask.sum())
        assert left == 4  # and one for the edges of padding
        assert {1.0, 2.0} <= set(batch.x[:left, 0].tolist())
        real = batch.edge_index[:, batch.edges_mask]
        assert (real < left).all()
        assert batch.place[:left].diff()[batch.batch[:left].diff() == 0].gt(0).all()
        # An edge of a ring leads to the next node, and its attribute is its graph's.
        first, second = batch.place[real]
        assert torch.equal(second, (first + 1) % torch.tensor([9, 2, 0])[batch.batch[real[0]]])
        assert torch.equal(batch.edge_attr[batch.edges_mask, 0], batch.x[real[0], 0])


@pytest.mark.spec("geometric", 26, 27, 28)
def test_trimming_edges_keeps_nodes_and_no_graph_is_left_empty() -> None:
    samples = [made.graph(5, 0), made.graph(2, 1)]
    fewer = FixedSizeCollater(made.sizes(9, 4, 3), True, trim_edges=True)(samples)
    assert (fewer.edges_mask.tolist(), fewer.nodes_mask.sum()) == ([True] * 4, 7)
    assert {1.0, 2.0} <= set(fewer.edge_attr[:, 0].tolist())
    both = FixedSizeCollater(made.sizes(6, 2, 3), True, trim_nodes=True, trim_edges=True)(samples)
    assert (both.num_nodes, both.num_edges, both.num_graphs) == (6, 2, 3)
    with pytest.raises(RuntimeError, match="would leave empty graphs"):
        FixedSizeCollater(made.sizes(1, 9, 3), trim_nodes=True)(samples)


@pytest.mark.spec("geometric", 30, 35)
def test_trimming_draws_anew_follows_the_seed_and_leaves_samples_as_they_are() -> None:
    collate = FixedSizeCollater(made.sizes(5, 9, 4), True, trim_nodes=True, trim_edges=True)
    samples = [made.graph(40), *made.graphs(2)]
    before = copy.deepcopy(samples)
    torch.manual_seed(3)
    first, second = collate(samples).place, collate(samples).place
    torch.manual_seed(3)
    assert torch.equal(collate(samples).place, first)
    assert not torch.equal(first, second)
    assert all(made.same(now, then) for now, then in zip(samples, before, strict=True))


@pytest.mark.spec("geometric", 36, 37, 39)
def test_graphs_with_types_have_fixed_sizes_of_each_and_are_trimmed_by_type() -> None:
    sizes, samples = made.sizes(12, 14, 4, node_pad_value=-1), made.heteros(2)
    batch = FixedSizeCollater(sizes, add_masks_to_batch=True)(samples)
    assert type(batch) is HeteroDataBatch
    assert sizes.num_nodes == {"v0": 12, "v1": 12}
    assert sizes.num_edges == dict.fromkeys(made.EDGES, 14)
    assert (batch.num_nodes, batch.num_edges, batch.num_graphs) == (24, 42, 4)
    assert batch.graphs_mask.tolist() == [True, True, False, False]
    for kind in made.TYPES:
        store = batch[kind]
        assert store.num_nodes == 12
        real = sum(sample[kind].num_nodes for sample in samples)
        assert store.nodes_mask.tolist() == [at < real for at in range(12)]
        assert (store.x[real:] == -1).all()
        assert store.ptr[-1] == 12
    for kind in made.EDGES:
        store = batch[kind]
        real = int(store.edges_mask.sum())
        assert store.edge_index.shape == (2, 14)
        for row, end in zip(store.edge_index, (kind[0], kind[2]), strict=True):
            assert (row[real:] >= batch[end].nodes_mask.sum()).all()
            assert row.max() < 12
    assert (batch.label.shape, batch["v0"].y.shape) == ((4,), (12,))
    sizes = pg.FixedSizeOptions({"v0": 6, "v1": 30}, dict.fromkeys(made.EDGES, 5), 3)
    samples = [made.hetero(9, 4, 0), made.hetero(2, 3, 1)]
    batch = FixedSizeCollater(sizes, True, trim_nodes=True, trim_edges=True)(samples)
    assert batch["v1"].nodes_mask.sum() == 7
    assert batch["v0"].nodes_mask.sum() <= 6
    for kind in made.EDGES:
        store = batch[kind]
        real = store.edge_index[:, store.edges_mask]
        for row, end in zip(real, (kind[0], kind[2]), strict=True):
            assert batch[end].nodes_mask[row].all()


@pytest.mark.spec("geometric", 38)
def test_types_without_a_size_are_named_and_those_without_features_count_their_nodes() -> None:
    sizes = pg.FixedSizeOptions({"v0": 9}, dict.fromkeys(made.EDGES, 9))
    with pytest.raises(AssertionError, match="'v1' exists in the data but not in the fixed size"):
        FixedSizeCollater(sizes)([made.hetero()])
    sizes = pg.FixedSizeOptions({"v0": 9, "v1": 9}, {made.EDGES[0]: 9})
    with pytest.raises(AssertionError, match=r"Edge type \('v1', 'e1', 'v0'\) exists"):
        FixedSizeCollater(sizes)([made.hetero()])
    data = HeteroData()
    data["a"].num_nodes = 3
    data["b"].x = torch.ones(2, 1)
    data["b"].name = "text"
    data["a", "to", "b"].edge_index = torch.tensor([[2], [1]])
    batch = FixedSizeCollater(made.sizes(5, 4, 2))([data])
    assert (batch["a"].num_nodes, batch["b"].num_nodes) == (5, 5)
    assert batch["b"].name == ["text", "text"]


@pytest.mark.spec("geometric", 40, 41, 42, 43, 44)
def test_combined_batches_follow_one_another() -> None:
    whole = CombinedBatchingCollater(FixedSizeCollater(made.sizes(19, 19, 5)))(GRAPHS[:4])
    assert whole.x.shape == (19, 2)
    collate = FixedSizeCollater(made.sizes(9, 9, 3), add_masks_to_batch=True)
    with pytest.raises(AssertionError, match="Invalid batch size"):
        CombinedBatchingCollater(collate, 2)(GRAPHS[:3])
    for graph in (samples := made.graphs(4)):
        graph.name = str(graph.num_nodes)
    batch = CombinedBatchingCollater(collate, 2)(samples)
    one, two = collate(samples[:2]), collate(samples[2:])
    assert batch.edge_index.shape == (4, 9)
    assert torch.equal(batch.edge_index, torch.cat([one.edge_index, two.edge_index]))
    assert batch.batch.tolist() == [*one.batch.tolist(), *two.batch.tolist()]
    assert batch.ptr.tolist() == [0, 2, 5, 9, 0, 4, 6, 9]
    assert batch.graphs_mask.tolist() == [True, True, False] * 2
    assert (batch.num_nodes, batch.num_edges, batch.num_graphs) == (9, 9, 3)
    assert batch.name == ["2", "3", "2", "4", "2", "4"]
    with pytest.raises(RuntimeError):
        batch.to_data_list()
    typed = CombinedBatchingCollater(FixedSizeCollater(made.sizes(9, 9, 3)), 2)(made.heteros(4))
    assert (typed.num_nodes, typed.num_graphs) == (18, 3)
    assert (typed["v0"].x.shape, typed[made.EDGES[0]].num_edges) == ((18, 2), 9)
    assert CombinedBatchingCollater(list, 2)([1, 2, 3, 4]) == [1, 2, 3, 4]


def several() -> list:
    typed = made.hetero()
    typed.name = "text"
    return [
        made.graph(3), Batch.from_data_list(made.graphs(2)), typed,
        Batch.from_data_list(made.heteros(2)),
    ]  # fmt: skip


@pytest.mark.spec("geometric", 76, 77, 78, 79)
@pytest.mark.parametrize("data", several(), ids=lambda data: type(data).__name__)
def test_graphs_are_taken_apart_and_put_together_as_arguments_and_results(data) -> None:
    def nodes(data):
        return data["v0"] if isinstance(data, HeteroData) else data

    captured = []

    def forward(factor, data):
        captured.append(data)
        nodes(data).h = nodes(data).x * factor
        return data

    data.text = "text"
    parser = pg.PyGArgsParser()
    tensors = list(parser.yieldTensors(data))
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    again = parser.reconstruct(data, iter([tensor.clone() for tensor in tensors]))
    assert again is not data
    assert made.same(again, data)
    assert again.text == "text"
    if isinstance(data, Batch):
        assert (again.num_graphs, again.num_nodes) == (data.num_graphs, data.num_nodes)
    before = {key: shape for key, (shape, _) in made.shapes(data).items()}
    model = poptorch.inferenceModel(Calling(forward), unchecked())
    for factor in (3.0, 2.0):
        out = model(torch.tensor([factor]), data)
        assert torch.equal(nodes(out).h, factor * nodes(data).x)
    assert len(captured) == 1
    assert type(out) is type(again) is type(data)
    after = {key: shape for key, (shape, _) in made.shapes(out).items()}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    nodes(again).x = nodes(again).x[1:]
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(torch.tensor([2.0]), again)


def test_tensors_come_in_a_fixed_order() -> None:
    parser = pg.PyGArgsParser()
    data = Data(y=torch.tensor([1]), edge_index=torch.zeros(2, 3), x=torch.ones(4))
    assert [t.numel() for t in parser.yieldTensors(data)] == [6, 4, 1]
    typed = HeteroData()
    typed["b"].x, typed["a"].z, typed["a"].x = torch.ones(1), torch.ones(2), torch.ones(3)
    typed["a", "b"].edge_index = torch.zeros(2, 2)
    typed.label = torch.ones(5)
    assert [t.numel() for t in parser.yieldTensors(typed)] == [5, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="Unsupported data type"):
        list(parser.yieldTensors(TemporalData(src=torch.zeros(2))))


def test_combined_batches_are_cut_into_micro_batches() -> None:
    seen = []

    def forward(batch):
        seen.append((batch.num_nodes, batch.num_graphs, tuple(batch.edge_index.shape)))
        return batch.x.new_zeros(4).index_add(0, batch.batch, batch.x[:, 0])

    opts = unchecked(iterations=2).outputMode(poptorch.OutputMode.All)
    (batch,) = pg.FixedSizeDataLoader(made.graphs(6), 4, options=opts)
    out = infer(forward, batch, opts=opts)
    assert (seen, out.tolist()) == ([(13, 4, (2, 13))], [2, 6, 12, 0, 8, 15, 24, 0])
