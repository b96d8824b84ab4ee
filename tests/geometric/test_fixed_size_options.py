"""Sizes of padded batches: their defaults, their limits, and sizes taken from data."""

from collections.abc import Iterator

import pytest
from torch_geometric.data import Batch, Data

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader


@pytest.mark.spec("geometric", 1)
def test_the_package_exports_its_public_names() -> None:
    assert set(pg.__all__) == {
        "FixedSizeDataLoader",
        "FixedSizeOptions",
        "FixedSizeStrategy",
        "OverSizeStrategy",
        "PyGArgsParser",
        "TrainingStepper",
        "__version__",
        "make_exclude_keys",
        "set_aggregation_dim_size",
    }


def test_the_version_is_that_of_poptorch() -> None:
    assert pg.__version__ == poptorch.__version__


def test_strategies_have_the_documented_values() -> None:
    assert pg.FixedSizeStrategy.PadToMax.value == 0
    assert [each.value for each in pg.OverSizeStrategy] == [0, 1, 2, 3, 4]


@pytest.mark.spec("geometric", 2)
def test_edges_default_to_all_pairs_of_nodes_and_graphs_to_two() -> None:
    sizes = pg.FixedSizeOptions(10)

    assert sizes.num_edges == 10 * 9
    assert sizes.num_graphs == 2


@pytest.mark.parametrize("nothing", [None, 0])
def test_no_number_of_edges_means_all_pairs_of_nodes(nothing: int | None) -> None:
    assert pg.FixedSizeOptions(10, nothing).num_edges == 10 * 9


@pytest.mark.spec("geometric", 3)
def test_edges_default_to_all_pairs_of_nodes_of_every_type() -> None:
    assert pg.FixedSizeOptions({"a": 3, "b": 2}).num_edges == 5 * 4


@pytest.mark.spec("geometric", 5)
def test_padding_defaults_to_zeros_and_to_no_values_of_graphs() -> None:
    sizes = pg.FixedSizeOptions(10)

    assert sizes.node_pad_value == 0.0
    assert sizes.edge_pad_value == 0.0
    assert sizes.graph_pad_value == 0.0
    assert sizes.pad_graph_defaults == {}


def test_a_padding_value_becomes_a_float() -> None:
    value = pg.FixedSizeOptions(5, node_pad_value=3).node_pad_value

    assert type(value) is float
    assert value == 3.0


@pytest.mark.parametrize(
    "name",
    [
        "num_nodes",
        "node_pad_value",
        "num_edges",
        "edge_pad_value",
        "num_graphs",
        "graph_pad_value",
        "pad_graph_defaults",
    ],
)
def test_the_representation_shows_every_setting(name: str) -> None:
    assert f"{name}=" in repr(pg.FixedSizeOptions(10))


@pytest.mark.spec("geometric", 4)
def test_one_graph_is_refused_because_one_place_is_for_padding() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        pg.FixedSizeOptions(5, num_graphs=1)


def test_one_graph_of_a_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        pg.FixedSizeOptions.from_dataset(made.graphs(), 1)


@pytest.mark.spec("geometric", 6)
def test_sizes_with_one_plain_number_are_not_yet_heterogeneous() -> None:
    assert not pg.FixedSizeOptions({"a": 5, "b": 6}, 7).is_hetero()


@pytest.mark.spec("geometric", 7)
def test_to_hetero_gives_every_type_the_full_number_in_place() -> None:
    sizes = pg.FixedSizeOptions({"a": 5, "b": 6}, 7)

    returned = sizes.to_hetero(["a", "b"], ["e", "f"])

    assert returned is sizes
    assert sizes.is_hetero()
    assert sizes.num_nodes == {"a": 5, "b": 6}
    assert sizes.num_edges == {"e": 7, "f": 7}
    assert sizes.total_num_nodes == 5 + 6
    assert sizes.total_num_edges == 7 + 7


@pytest.mark.spec("geometric", 8)
def test_a_data_set_gives_room_for_its_largest_graphs_and_one_padding_graph() -> None:
    largest = 4  # nodes of a graph, and as many edges

    sizes = pg.FixedSizeOptions.from_dataset(made.graphs(), 10)

    assert sizes.num_nodes == 9 * largest + 1
    assert sizes.num_edges == 9 * largest + 1
    assert sizes.num_graphs == 10


def test_a_sample_limit_looks_at_the_first_graphs_only() -> None:
    first = 2  # nodes of the first graph, the smallest

    sizes = pg.FixedSizeOptions.from_dataset(made.graphs(), 10, sample_limit=1)

    assert sizes.num_nodes == 9 * first + 1


def test_a_data_set_with_types_gives_a_size_for_each_type() -> None:
    sizes = pg.FixedSizeOptions.from_dataset(made.heteros(), 3)

    assert sizes.num_nodes == {"v0": 2 * 4 + 1, "v1": 2 * 4 + 1}
    assert sizes.num_edges == dict.fromkeys(made.EDGES, 2 * 4 + 1)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="is empty"):
        pg.FixedSizeOptions.from_dataset([], 2)


class CountingLoader:
    """Yields two batches in each pass, and counts what it has yielded."""

    def __init__(self) -> None:
        graphs = made.graphs()
        self.batches = [Batch.from_data_list(graphs[:3]), Batch.from_data_list(graphs[:2])]
        self.yielded = 0

    def __iter__(self) -> Iterator[Data]:
        for batch in self.batches:
            self.yielded += 1
            yield batch


def test_a_loader_gives_room_for_its_largest_batch_and_one_padding_graph() -> None:
    sizes = pg.FixedSizeOptions.from_loader(CountingLoader())

    assert sizes.num_nodes == (2 + 3 + 4) + 1
    assert sizes.num_edges == (2 + 3 + 4) + 1
    assert sizes.num_graphs == 3 + 1


@pytest.mark.spec("geometric", 10)
def test_a_loader_shorter_than_the_sample_limit_is_read_several_times() -> None:
    loader = CountingLoader()

    sizes = pg.FixedSizeOptions.from_loader(loader, sample_limit=5)

    assert loader.yielded == 5
    assert sizes.num_graphs == 3 + 1


@pytest.mark.spec("geometric", 9)
def test_a_neighbour_loader_gives_one_graph_and_one_of_padding() -> None:
    loader = FixedSizeNeighborLoader(
        made.random_graph(),
        [3, 2],
        batch_size=4,
        fixed_size_options=pg.FixedSizeOptions(60, 300),
    )

    sizes = pg.FixedSizeOptions.from_loader(loader.neighbour_loader, 20)

    assert sizes.num_graphs == 2


def test_graphs_with_types_can_take_the_place_of_batches() -> None:
    sizes = pg.FixedSizeOptions.from_loader(made.heteros())

    assert sizes.num_nodes == {"v0": 4 + 1, "v1": 4 + 1}
