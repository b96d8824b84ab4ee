"""Neighbourhoods of seeds of a large graph, in batches of one size."""

from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import options
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader, PyGFixedSizeNeighborLoader

GRAPH = made.random_graph()
ALL_OF_TWO_HOPS = [-1, -1]
"""All neighbours, so that nothing is drawn."""
NODES = 61
EDGES = 800


def neighbour_loader(**settings: Any) -> FixedSizeNeighborLoader:
    """Loads four seeds a micro-batch with all neighbours of two hops, but for ``settings``."""
    defaults = {
        "num_neighbors": ALL_OF_TWO_HOPS,
        "batch_size": 4,
        "fixed_size_options": pg.FixedSizeOptions(NODES, EDGES, 2),
    }
    return FixedSizeNeighborLoader(GRAPH, **(defaults | settings))


SEEDS = torch.arange(0, 46, 2)
"""23 seeds, which make two calls of two micro-batches of four."""


@pytest.fixture(scope="module")
def shuffled() -> FixedSizeNeighborLoader:
    """Loads the seeds in a random order, in two device iterations; padding is -1."""
    return neighbour_loader(
        input_nodes=SEEDS,
        shuffle=True,
        fixed_size_options=pg.FixedSizeOptions(NODES, EDGES, 2, node_pad_value=-1),
        options=options(iterations=2),
    )


@pytest.fixture(scope="module")
def batches(shuffled: FixedSizeNeighborLoader) -> list[Data]:
    torch.manual_seed(0)
    return list(shuffled)


@pytest.mark.spec("geometric", 71)
def test_the_length_is_the_number_of_whole_calls(
    shuffled: FixedSizeNeighborLoader, batches: list[Data]
) -> None:
    assert len(shuffled) == 23 // (4 * 2)
    assert len(batches) == 2


@pytest.mark.spec("geometric", 69)
def test_the_seeds_are_not_padded(batches: list[Data]) -> None:
    for batch in batches:
        assert batch.batch_size == 4
        assert batch.input_id.shape == (2 * 4,)


@pytest.mark.spec("geometric", 68)
@pytest.mark.parametrize("at", range(2))
def test_seeds_come_first_in_their_order(batches: list[Data], at: int) -> None:
    for batch in batches:
        seeds = SEEDS[batch.input_id[4 * at :][:4]]
        first_nodes = batch.n_id[NODES * at :][:4]
        assert torch.equal(first_nodes, seeds)


@pytest.mark.spec("geometric", 70)
@pytest.mark.parametrize("at", range(2))
def test_every_node_has_its_number_in_the_whole_graph_and_padding_its_value(
    batches: list[Data], at: int
) -> None:
    for batch in batches:
        assert batch.n_id.shape == (2 * NODES,)
        numbers = batch.n_id[NODES * at :][:NODES]
        features = batch.x[NODES * at :][:NODES]
        real = batch.nodes_mask[NODES * at :][:NODES]
        assert torch.equal(features[real], GRAPH.x[numbers[real]])
        assert (numbers[~real] == -1).all()


@pytest.mark.spec("geometric", 68)
def test_seeds_are_never_trimmed() -> None:
    loader = neighbour_loader(fixed_size_options=pg.FixedSizeOptions(7, 5))

    for batch in loader:
        assert batch.num_nodes == 7
        assert batch.num_edges == 5
        assert torch.equal(batch.n_id[:4], batch.input_id)


@pytest.mark.spec("geometric", 73)
def test_sampling_and_then_padding_by_hand_makes_the_loaders_batches() -> None:
    loader = neighbour_loader()

    for at, batch in enumerate(loader):
        seeds = [*range(4 * at, 4 * at + 4)]
        native = loader.nativeCollate(seeds)
        assert native.num_nodes < NODES
        assert made.same(loader.fixedSizeCollate(native), batch)


def test_seeds_without_types_have_no_input_type() -> None:
    assert neighbour_loader().input_type is None


@pytest.fixture(scope="module")
def typed_loader() -> FixedSizeNeighborLoader:
    """Loads five seeds of the type v0 a micro-batch, in two device iterations."""
    return FixedSizeNeighborLoader(
        made.hetero_graph(),
        [3, 2],
        input_nodes=("v0", None),
        batch_size=5,
        fixed_size_options=pg.FixedSizeOptions(31, 91),
        options=options(iterations=2),
    )


@pytest.fixture(scope="module")
def typed_batch(typed_loader: FixedSizeNeighborLoader) -> HeteroData:
    return next(iter(typed_loader))


def test_a_loader_of_seeds_of_one_type_knows_the_type_and_its_length(
    typed_loader: FixedSizeNeighborLoader,
) -> None:
    assert typed_loader.input_type == "v0"
    assert len(typed_loader) == 30 // (5 * 2)


@pytest.mark.spec("geometric", 72)
def test_only_the_type_of_the_seeds_has_a_batch_size(typed_batch: HeteroData) -> None:
    assert typed_batch["v0"].batch_size == 5
    assert "batch_size" not in typed_batch["v1"]


def test_seeds_of_one_type_come_first_in_their_type(typed_batch: HeteroData) -> None:
    assert typed_batch["v0"].input_id.tolist() == [*range(10)]
    assert typed_batch["v0"].n_id[:5].tolist() == [*range(5)]


@pytest.mark.parametrize("kind", made.EDGES, ids=lambda kind: kind[1])
def test_edges_of_each_type_are_padded_and_masked(
    typed_batch: HeteroData, kind: tuple[str, str, str]
) -> None:
    store = typed_batch[kind]

    assert store.edge_index.shape == (2 * 2, store.num_edges)
    assert store.edges_mask.dtype == torch.bool


@pytest.fixture
def few_samples_for_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are taken from 15 samples: the usual 1000 take seconds."""
    function = pg.FixedSizeOptions.from_loader.__func__
    monkeypatch.setattr(function, "__defaults__", (15,))


def most_nodes_of_a_batch(loader: FixedSizeNeighborLoader) -> int:
    """The largest number of nodes before padding, of four seeds after another."""
    starts = range(0, GRAPH.num_nodes, 4)
    return max(loader.nativeCollate([*range(at, at + 4)]).num_nodes for at in starts)


@pytest.mark.usefixtures("few_samples_for_sizes")
def test_sizes_default_to_those_of_the_samples_and_one_padding_node() -> None:
    loader = FixedSizeNeighborLoader(GRAPH, ALL_OF_TWO_HOPS, batch_size=4)

    assert loader.fixed_size_options.num_nodes == most_nodes_of_a_batch(loader) + 1


@pytest.mark.usefixtures("few_samples_for_sizes")
def test_the_plain_loader_has_the_same_sizes_and_adds_no_masks() -> None:
    loader = FixedSizeNeighborLoader(GRAPH, ALL_OF_TWO_HOPS, batch_size=4)

    batch = next(iter(PyGFixedSizeNeighborLoader(GRAPH, ALL_OF_TWO_HOPS, batch_size=4)))

    assert batch.num_nodes == most_nodes_of_a_batch(loader) + 1
    assert "nodes_mask" not in batch


def test_times_of_seeds_without_times_of_nodes_are_refused_by_torch_geometric() -> None:
    with pytest.raises(ValueError, match="input_time"):
        neighbour_loader(input_time=torch.arange(60))


def test_fanouts_of_different_lengths_are_refused_by_torch_geometric() -> None:
    fanouts = dict(zip(made.EDGES, ([2, 2], [2], [2, 2]), strict=True))

    with pytest.raises(ValueError, match="Number of hops"):
        FixedSizeNeighborLoader(made.hetero_graph(), fanouts, input_nodes="v0")


def test_sizes_for_more_than_two_graphs_are_refused() -> None:
    with pytest.raises(AssertionError, match="num_graphs=2"):
        neighbour_loader(fixed_size_options=pg.FixedSizeOptions(60, 300, 3))
