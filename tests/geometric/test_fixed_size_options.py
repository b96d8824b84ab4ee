"""The sizes of batches: defaults, limits, types, sizes from data sets and loaders."""

import pytest
import torch
from torch_geometric.data import Batch

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader


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
