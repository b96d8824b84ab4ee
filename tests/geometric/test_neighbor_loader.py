"""Sampled neighbourhoods, padded to one size."""

import pytest
import torch

import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import options
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader, PyGFixedSizeNeighborLoader

GRAPH = made.random_graph()
ALL = [-1, -1]  # nothing is drawn
SIZES = {"num_nodes": 61, "num_edges": 800, "num_graphs": 2}


def loader(**others) -> FixedSizeNeighborLoader:
    arguments = {"batch_size": 4, "fixed_size_options": pg.FixedSizeOptions(**SIZES)} | others
    return FixedSizeNeighborLoader(GRAPH, arguments.pop("num_neighbors", ALL), **arguments)


@pytest.mark.spec("geometric", 68, 69, 70, 71)
def test_seeds_come_first_and_are_never_trimmed() -> None:
    nodes = torch.arange(0, 46, 2)
    sizes = pg.FixedSizeOptions(**SIZES, node_pad_value=-1)
    sampled = loader(input_nodes=nodes, shuffle=True, fixed_size_options=sizes,
                     options=options(iterations=2))  # fmt: skip
    assert len(sampled) == 23 // 8
    for batch in sampled:
        assert (batch.batch_size, batch.input_id.shape) == (4, (8,))
        assert batch.n_id.shape == (122,)
        for at in range(2):
            seeds = nodes[batch.input_id[4 * at : 4 * at + 4]]
            assert torch.equal(batch.n_id[61 * at : 61 * at + 4], seeds)
            real = batch.nodes_mask[61 * at : 61 * at + 61]
            numbers = batch.n_id[61 * at : 61 * at + 61]
            assert torch.equal(batch.x[61 * at : 61 * at + 61][real], GRAPH.x[numbers[real]])
            assert (numbers[~real] == -1).all()
    for batch in loader(fixed_size_options=pg.FixedSizeOptions(7, 5)):
        assert (batch.num_nodes, batch.num_edges) == (7, 5)
        assert torch.equal(batch.n_id[:4], batch.input_id)


@pytest.mark.spec("geometric", 73)
def test_the_two_halves_make_the_whole() -> None:
    sampled = loader()
    for at, batch in enumerate(sampled):
        native = sampled.nativeCollate([*range(4 * at, 4 * at + 4)])
        assert native.num_nodes < 61
        assert made.same(sampled.fixedSizeCollate(native), batch)
    assert sampled.input_type is None


@pytest.mark.spec("geometric", 72)
def test_seeds_of_one_type() -> None:
    sampled = FixedSizeNeighborLoader(
        made.hetero_graph(), [3, 2], input_nodes=("v0", None), batch_size=5,
        fixed_size_options=pg.FixedSizeOptions(31, 91), options=options(iterations=2),
    )  # fmt: skip
    assert (sampled.input_type, len(sampled)) == ("v0", 3)
    batch = next(iter(sampled))
    assert batch["v0"].batch_size == 5
    assert batch["v0"].input_id.tolist() == [*range(10)]
    assert "batch_size" not in batch["v1"]
    assert batch["v0"].n_id[:5].tolist() == [*range(5)]
    for kind in made.EDGES:
        assert batch[kind].edge_index.shape == (4, batch[kind].num_edges)
        assert batch[kind].edges_mask.dtype == torch.bool


def test_sizes_default_to_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    function = pg.FixedSizeOptions.from_loader.__func__
    monkeypatch.setattr(function, "__defaults__", (15,))  # 1000 samples take seconds
    sampled = FixedSizeNeighborLoader(GRAPH, ALL, batch_size=4)
    largest = max(sampled.nativeCollate([*range(at, at + 4)]).num_nodes for at in range(0, 60, 4))
    assert sampled.fixed_size_options.num_nodes == largest + 1
    batch = next(iter(PyGFixedSizeNeighborLoader(GRAPH, ALL, batch_size=4)))
    assert "nodes_mask" not in batch
    assert batch.num_nodes == largest + 1


def test_torch_geometrics_own_checks_pass_through() -> None:
    with pytest.raises(ValueError, match="input_time"):
        loader(input_time=torch.arange(60))
    with pytest.raises(ValueError, match="Number of hops"):
        fanouts = dict(zip(made.EDGES, ([2, 2], [2], [2, 2]), strict=True))
        FixedSizeNeighborLoader(made.hetero_graph(), fanouts, input_nodes="v0")
    with pytest.raises(AssertionError, match="num_graphs=2"):
        loader(fixed_size_options=pg.FixedSizeOptions(60, 300, 3))
