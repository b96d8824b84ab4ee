"""Loaders of graphs: micro-batches, strategies, workers, processes."""

import pickle

import pytest
import torch
import torch_geometric.transforms as transforms
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as PyGLoader

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.loaders import FORK
from helpers.wrapping import options
from poptorch_geometric import pyg_dataloader
from poptorch_geometric.dataloader import DataLoader

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
