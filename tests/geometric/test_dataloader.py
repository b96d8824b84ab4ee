"""Loaders of graphs: batches of one size, and those of torch_geometric."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.transforms as transforms
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as PyGLoader

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.loaders import FORK
from helpers.wrapping import options
from poptorch_geometric import pyg_dataloader
from poptorch_geometric.dataloader import DataLoader

GRAPHS = made.graphs()
"""Nine rings of 2, 3, 4, 2, 3, 4, 2, 3, 4 nodes; ``y`` is a graph's place in this list."""


def real_samples(batch: Data) -> list[int]:
    """The ``y`` of a batch's graphs, without padding."""
    samples: list[int] = batch.y[batch.graphs_mask].tolist()
    return samples


# Batches of one size.


@pytest.fixture
def twenty_graphs_in_tens() -> pg.FixedSizeDataLoader:
    """A shuffling loader of 20 graphs with a batch size of 10, which makes 9 and one of padding."""
    return pg.FixedSizeDataLoader(made.graphs(20), batch_size=10, shuffle=True)


@pytest.mark.spec("geometric", 46)
def test_the_batch_size_includes_the_padding_graph(
    twenty_graphs_in_tens: pg.FixedSizeDataLoader,
) -> None:
    batches = list(twenty_graphs_in_tens)

    assert twenty_graphs_in_tens.padded_batch_size == 10
    assert len(twenty_graphs_in_tens) == 2
    assert [int(batch.graphs_mask.sum()) for batch in batches] == [9, 9]


@pytest.mark.spec("geometric", 48)
def test_sizes_default_to_room_for_any_choice_of_samples(
    twenty_graphs_in_tens: pg.FixedSizeDataLoader,
) -> None:
    largest = 4

    assert twenty_graphs_in_tens.fixed_size_options.num_nodes == 9 * largest + 1


@pytest.mark.spec("geometric", 49)
def test_all_batches_of_a_loader_have_equal_shapes(
    twenty_graphs_in_tens: pg.FixedSizeDataLoader,
) -> None:
    first, second = twenty_graphs_in_tens

    assert made.shapes(first) == made.shapes(second)


def test_no_sample_comes_twice_in_an_epoch(twenty_graphs_in_tens: pg.FixedSizeDataLoader) -> None:
    samples = [sample for batch in twenty_graphs_in_tens for sample in real_samples(batch)]

    assert len(samples) == 18
    assert len(set(samples)) == 18


@pytest.mark.spec("geometric", 47)
def test_a_batch_size_other_than_the_number_of_graphs_is_refused() -> None:
    with pytest.raises(AssertionError, match="must match"):
        pg.FixedSizeDataLoader(GRAPHS, batch_size=3, fixed_size_options=made.sizes(count=4))


def test_the_rest_is_dropped_unless_it_is_asked_for() -> None:
    assert len(list(pg.FixedSizeDataLoader(made.graphs(5), 4))) == 1


def test_an_incomplete_batch_is_filled_up_with_padding_graphs() -> None:
    loader = pg.FixedSizeDataLoader(made.graphs(5), 4, drop_last=False)

    full, rest = loader

    assert len(loader) == 2
    assert made.shapes(rest) == made.shapes(full)
    assert rest.graphs_mask.tolist() == [True, True, False, False]


@pytest.fixture(params=["poptorch", "torch"])
def loader_of_threes(request: pytest.FixtureRequest) -> torch.utils.data.DataLoader:
    """Loads three graphs and one of padding, through poptorch's loader or the plain torch one."""
    if request.param == "torch":
        return pyg_dataloader.FixedSizeDataLoader(GRAPHS, 4)
    return pg.FixedSizeDataLoader(GRAPHS, batch_size=4)


@pytest.mark.spec("ops", 30)
def test_samples_come_in_order(loader_of_threes: torch.utils.data.DataLoader) -> None:
    batches = list(loader_of_threes)

    assert [batch.y[:3].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for batch in batches:
        assert batch.num_graphs == 4
        assert batch.num_nodes == 3 * 4 + 1
        assert batch.x.shape == (13, 2)


@pytest.mark.spec("geometric", 75)
def test_a_loader_starts_again_after_an_epoch_that_was_broken_off(
    loader_of_threes: torch.utils.data.DataLoader,
) -> None:
    next(iter(loader_of_threes))

    for _ in range(2):
        assert [batch.y[0].item() for batch in loader_of_threes] == [0, 3, 6]


def test_poptorchs_loader_adds_masks() -> None:
    for batch in pg.FixedSizeDataLoader(GRAPHS, batch_size=4):
        assert batch.graphs_mask.tolist() == [True, True, True, False]


def test_a_batch_of_the_plain_loader_can_be_divided_into_graphs() -> None:
    batches = pyg_dataloader.FixedSizeDataLoader(GRAPHS, 4)

    assert [len(batch.to_data_list()) for batch in batches] == [4, 4, 4]


# What a loader decides itself.


def test_a_subclass_may_change_the_collater() -> None:
    class FirstSampleOnly(pg.FixedSizeDataLoader):
        def _create_collater(self, **collater_args: object) -> Callable[[list[Data]], Any]:
            collate = super()._create_collater(**collater_args)
            return lambda samples: collate(samples[:1])

    batch = next(iter(FirstSampleOnly(GRAPHS, 3)))

    assert batch.y.tolist() == [0, 0, 0]


@pytest.mark.spec("geometric", 50)
def test_a_fixed_size_loader_refuses_a_collate_function() -> None:
    with pytest.raises(AssertionError, match="collate_fn"):
        pg.FixedSizeDataLoader(GRAPHS, collate_fn=list)


@pytest.mark.spec("geometric", 50)
def test_the_loader_without_padding_drops_a_collate_function() -> None:
    batch = next(iter(DataLoader(GRAPHS, 2, collate_fn=list)))

    assert batch.num_graphs == 2


@pytest.mark.spec("geometric", 51)
def test_packing_refuses_a_batch_sampler() -> None:
    pack = pg.FixedSizeStrategy.StreamPack

    with pytest.raises(ValueError, match="incompatible"):
        pg.FixedSizeDataLoader(GRAPHS, 4, fixed_size_strategy=pack, batch_sampler=[[0]])


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Unknown fixed_size_strategy"):
        pg.FixedSizeDataLoader(GRAPHS, 4, fixed_size_strategy="all")


def test_batches_of_graphs_cannot_be_divided_and_joined() -> None:
    with pytest.raises(poptorch.Error, match="cannot be used with batches of graphs"):
        pg.FixedSizeDataLoader(GRAPHS, 4, mode=poptorch.DataLoaderMode.AsyncRebatched)


@pytest.mark.spec("geometric", 52)
def test_a_batch_sampler_decides_which_samples_are_in_a_micro_batch() -> None:
    loader = pg.FixedSizeDataLoader(
        GRAPHS,
        4,
        batch_sampler=[[0, 5], [8], [1, 2, 3], [4]],
        options=options(iterations=2),
    )

    batches = list(loader)

    assert len(loader) == 2
    assert [real_samples(batch) for batch in batches] == [[0, 5, 8], [1, 2, 3, 4]]
    assert batches[0].x.shape == (2 * 13, 2)
    assert batches[0].num_nodes == 13
    assert batches[0].num_graphs == 4


# Device iterations, workers and processes.


@pytest.fixture(params=["fixed size", "torch_geometric's"])
def make_loader(request: pytest.FixtureRequest) -> Callable[[int], poptorch.DataLoader]:
    """Makes a loader of one graph a micro-batch, with this number of device iterations."""

    def make(iterations: int) -> poptorch.DataLoader:
        opts = options(iterations=iterations)
        if request.param == "fixed size":
            return pg.FixedSizeDataLoader(GRAPHS, 2, options=opts)
        return DataLoader([made.graph(3, at) for at in range(9)], 1, options=opts)

    return make


@pytest.mark.spec("geometric", 63, 65)
def test_device_iterations_multiply_the_first_dimension_of_every_tensor(
    make_loader: Callable[[int], poptorch.DataLoader],
) -> None:
    one = made.shapes(next(iter(make_loader(1))))
    three = made.shapes(next(iter(make_loader(3))))

    tripled = {key: ((3 * first, *others), dtype) for key, ((first, *others), dtype) in one.items()}
    assert three == tripled


@pytest.mark.spec("geometric", 63, 65)
@pytest.mark.parametrize("name", ["x", "edge_index", "y", "ptr"])
def test_micro_batches_of_one_call_are_in_order(
    make_loader: Callable[[int], poptorch.DataLoader], name: str
) -> None:
    one = list(make_loader(1))
    three = list(make_loader(3))

    assert len(one) == 9
    assert len(three) == 3
    for at, batch in enumerate(three):
        parts = one[3 * at : 3 * at + 3]
        assert torch.equal(batch[name], torch.cat([part[name] for part in parts]))


def test_a_batch_of_several_micro_batches_counts_the_nodes_of_one(
    make_loader: Callable[[int], poptorch.DataLoader],
) -> None:
    one = next(iter(make_loader(1)))
    three = next(iter(make_loader(3)))

    assert isinstance(three, Batch)
    assert three.num_nodes == one.num_nodes


@pytest.mark.spec("geometric", 63)
def test_batches_without_padding_equal_those_of_torch_geometric() -> None:
    arguments = {"follow_batch": ["x"], "exclude_keys": ["y"]}
    whole_batches = list(PyGLoader(GRAPHS, 2, **arguments))[:4]  # the ninth graph is dropped

    loader = DataLoader(GRAPHS, 2, **arguments)

    for batch, expected in zip(loader, whole_batches, strict=True):
        assert made.same(batch, expected)


def test_plain_batches_without_padding_equal_those_of_torch_geometric() -> None:
    arguments = {"follow_batch": ["x"], "exclude_keys": ["y"]}

    plain = pyg_dataloader.DataLoader(GRAPHS, 2, **arguments)

    for batch, expected in zip(plain, PyGLoader(GRAPHS, 2, **arguments), strict=True):
        assert made.same(batch, expected)
        assert len(batch.to_data_list()) == expected.num_graphs


@pytest.mark.spec("geometric", 64)
@pytest.mark.parametrize(
    "samples, types, edge_types",
    [(GRAPHS, None, None), (made.heteros(), made.TYPES, made.EDGES)],
    ids=["Data", "HeteroData"],
)
def test_padding_by_torch_geometric_makes_one_shape(
    samples: list[Data] | list[HeteroData],
    types: tuple[str, ...] | None,
    edge_types: tuple[tuple[str, str, str], ...] | None,
) -> None:
    pad = transforms.Pad(
        max_num_nodes=dict.fromkeys(types, 6) if types else 6,
        max_num_edges=dict.fromkeys(edge_types, 6) if edge_types else 6,
    )

    first, *others = DataLoader([pad(sample) for sample in samples], 2)

    assert others
    for batch in others:
        assert made.shapes(batch) == made.shapes(first)


@pytest.mark.spec("geometric", 74)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 2, "persistent_workers": True},
        {"mode": poptorch.DataLoaderMode.Async, "async_options": FORK},
    ],
    ids=["persistent workers", "asynchronous"],
)
def test_workers_load_the_same_batches_in_every_epoch(settings: dict[str, Any]) -> None:
    opts = options(iterations=2)
    expected = list(pg.FixedSizeDataLoader(GRAPHS, 3, options=opts))

    loader = pg.FixedSizeDataLoader(GRAPHS, 3, options=opts, **settings)

    assert len(expected) == 2
    for _ in range(2):
        for batch, without_workers in zip(loader, expected, strict=True):
            assert made.same(batch, without_workers)
            assert batch.num_nodes == without_workers.num_nodes
            assert batch.num_graphs == without_workers.num_graphs
    loader.terminate()


@pytest.mark.parametrize("samples", [GRAPHS, made.heteros()], ids=["Data", "HeteroData"])
def test_batches_and_their_classes_can_be_pickled(
    samples: list[Data] | list[HeteroData],
) -> None:
    batch = next(iter(pg.FixedSizeDataLoader(samples, 3)))

    restored = pickle.loads(pickle.dumps(batch))
    same_class = pickle.loads(pickle.dumps(type(batch)))

    assert type(restored) is type(batch)
    assert same_class is type(batch)
    assert made.same(restored, batch)
    assert restored.num_graphs == 3


@pytest.fixture
def second_of_two_processes() -> poptorch.Options:
    opts = options()
    opts.Distributed.configureProcessId(1, 2)
    return opts


def test_several_processes_share_the_samples(second_of_two_processes: poptorch.Options) -> None:
    loader = pg.FixedSizeDataLoader(GRAPHS, 2, options=second_of_two_processes)

    assert [batch.y[0].item() for batch in loader] == [4, 5, 6, 7]


def test_several_processes_refuse_a_batch_sampler(
    second_of_two_processes: poptorch.Options,
) -> None:
    with pytest.raises(poptorch.Error, match="mutually exclusive with auto_distributed"):
        pg.FixedSizeDataLoader(GRAPHS, 4, options=second_of_two_processes, batch_sampler=[[0]])
