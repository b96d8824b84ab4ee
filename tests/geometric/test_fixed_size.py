"""Batches of graphs of fixed sizes: options, padding, trimming, packing, loaders, models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data

import poptorch_geometric as pg
from poptorch_geometric.collate import CombinedBatchingCollater, FixedSizeCollater
from poptorch_geometric.dataloader import DataLoader
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def graph(nodes: int, number: int = 0, of_nodes: bool = False) -> Data:
    """A ring of nodes; features tell which graph they belong to."""
    ring = torch.arange(nodes)
    return Data(
        x=torch.full((nodes, 2), float(number + 1)),
        edge_index=torch.stack([ring, (ring + 1) % nodes]),
        edge_attr=torch.full((nodes, 1), float(number + 1)),
        y=torch.full((nodes if of_nodes else 1,), number),
    )


GRAPHS = [graph(2 + at % 3, at) for at in range(9)]
SIZES = pg.FixedSizeOptions(num_nodes=14, num_edges=16, num_graphs=4)


def test_options_have_defaults_and_limits() -> None:
    assert pg.FixedSizeOptions(5).num_edges == 20
    assert pg.FixedSizeOptions(5).node_pad_value == 0.0
    with pytest.raises(ValueError, match="at least 2"):
        pg.FixedSizeOptions(5, num_graphs=1)
    by_type = pg.FixedSizeOptions(5, 7).to_hetero(["a", "b"], ["e"])
    assert by_type.is_hetero()
    assert (by_type.total_num_nodes, by_type.total_num_edges) == (10, 7)
    found = pg.FixedSizeOptions.from_dataset(GRAPHS, 4)
    assert (found.num_nodes, found.num_edges, found.num_graphs) == (13, 13, 4)
    batches = [Batch.from_data_list(GRAPHS[:3]), Batch.from_data_list(GRAPHS[:2])]
    found = pg.FixedSizeOptions.from_loader(batches)
    assert (found.num_nodes, found.num_edges, found.num_graphs) == (10, 10, 4)


@pytest.mark.parametrize("of_nodes", [False, True])
def test_padding_is_behind_what_is_real(of_nodes: bool) -> None:
    samples = [graph(3, 0, of_nodes), graph(4, 1, of_nodes)]
    sizes = pg.FixedSizeOptions(14, 16, 4, node_pad_value=-1, edge_pad_value=-2, graph_pad_value=-3)
    batch = FixedSizeCollater(sizes, add_masks_to_batch=True)(samples)
    assert (batch.num_nodes, batch.num_edges, batch.num_graphs) == (14, 16, 4)
    assert torch.equal(batch.x[:7], torch.cat([s.x for s in samples]))
    assert (batch.x[7:] == -1).all()
    assert (batch.edge_attr[7:] == -2).all()
    expected = torch.cat([s.y for s in samples])
    assert torch.equal(batch.y[: len(expected)], expected)
    assert (batch.y[len(expected) :] == (-1 if of_nodes else -3)).all()
    assert (batch.edge_index[:, 7:] >= 7).all()
    assert batch.ptr.tolist() == [0, 3, 7, 11, 14]
    for mask, count in ((batch.graphs_mask, 2), (batch.nodes_mask, 7), (batch.edges_mask, 7)):
        assert mask.dtype == torch.bool
        assert mask.sum() == count
        assert mask[:count].all()


def test_attributes_have_defaults_of_their_own_and_can_be_left_out() -> None:
    sizes = pg.FixedSizeOptions(9, 9, 2, pad_graph_defaults={"y": 7, "x": 5.0})
    keys = pg.make_exclude_keys(["x", "edge_index", "y"], GRAPHS[0])
    assert keys == ["edge_attr"]
    batch = FixedSizeCollater(sizes, exclude_keys=keys)([GRAPHS[0]])
    assert batch.y.tolist() == [0, 7]
    assert (batch.x[2:] == 5).all()
    assert "edge_attr" not in batch


@pytest.mark.parametrize("samples, sizes, phrase", [
    (GRAPHS[:3], (99, 99, 2), "3 graphs do not fit"),
    (GRAPHS[:2], (4, 99, 3), "5 nodes do not fit"),
    (GRAPHS[:2], (9, 4, 3), "5 edges do not fit"),
    (GRAPHS[:2], (9, 9, 2), "need a graph"),
    (GRAPHS[:2], (5, 9, 3), "need a node"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(samples, sizes, phrase: str) -> None:
    with pytest.raises(RuntimeError, match=phrase):
        FixedSizeCollater(pg.FixedSizeOptions(*sizes))(samples)


def test_labels_are_of_nodes_or_of_graphs() -> None:
    wrong = graph(3)
    wrong.y = torch.zeros(2)
    with pytest.raises(AssertionError, match="Labels y"):
        FixedSizeCollater(SIZES)([wrong])


def test_trimming_takes_random_nodes_and_edges_but_no_whole_graph() -> None:
    samples = [graph(5, 0), graph(2, 1)]
    batch = FixedSizeCollater(pg.FixedSizeOptions(5, 9, 3), True, trim_nodes=True)(samples)
    assert batch.nodes_mask.sum() == 4
    assert {1.0, 2.0} <= set(batch.x[:4, 0].tolist())
    fewer = FixedSizeCollater(pg.FixedSizeOptions(9, 4, 3), True, trim_edges=True)(samples)
    assert fewer.edges_mask.tolist() == [True] * 4
    assert fewer.nodes_mask.sum() == 7
    with pytest.raises(RuntimeError, match="only 5 can go"):
        FixedSizeCollater(pg.FixedSizeOptions(2, 9, 3), trim_nodes=True)(samples)


def test_combined_batches_are_joined_micro_batches() -> None:
    collater = CombinedBatchingCollater(2, FixedSizeCollater(pg.FixedSizeOptions(9, 9, 3)))
    batch = collater(GRAPHS[:4])
    assert batch.x.shape == (18, 2)
    assert batch.edge_index.shape == (4, 9)
    with pytest.raises(AssertionError, match="Invalid batch size"):
        collater(GRAPHS[:3])


@pytest.mark.spec("ops", 30)
def test_the_batch_size_includes_the_padding_graph() -> None:
    loader = pg.FixedSizeDataLoader(GRAPHS, batch_size=4)
    batches = list(loader)
    assert len(batches) == 3
    for at, batch in enumerate(batches):
        assert batch.num_graphs == 4
        assert batch.graphs_mask.tolist() == [True, True, True, False]
        assert batch.y[:3].tolist() == [3 * at, 3 * at + 1, 3 * at + 2]
        assert batch.x.shape == (13, 2)
    with pytest.raises(AssertionError, match="includes the padding graph"):
        pg.FixedSizeDataLoader(GRAPHS, batch_size=3, fixed_size_options=SIZES)
    with pytest.raises(AssertionError, match="collate_fn"):
        pg.FixedSizeDataLoader(GRAPHS, collate_fn=list)
    with pytest.raises(ValueError, match="StreamPack only"):
        pg.FixedSizeDataLoader(GRAPHS, over_size_strategy=pg.OverSizeStrategy.Skip)


def test_packing_takes_as_many_as_fit() -> None:
    sampler = StreamPackingSampler(GRAPHS, 3, 8, 8)
    # Graphs have 2, 3, 4, 2, ... nodes: the third would make 9.
    assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert len(sampler) == 5
    # Two graphs of 4 would leave no node for the third.
    assert list(StreamPackingSampler([graph(4), graph(4)], 3, 8)) == [[0], [1]]
    assert list(StreamPackingSampler([graph(4), graph(4)], 2, 8)) == [[0, 1]]
    with pytest.raises(RuntimeError, match="too large"):
        list(StreamPackingSampler([graph(9)], 1, 8))
    assert list(StreamPackingSampler([graph(9), graph(2)], 1, 8, allow_skip_data=True)) == [[1]]
    with pytest.raises(ValueError, match="fewer than"):
        StreamPackingSampler(GRAPHS, 3, 2)
    with pytest.raises(NotImplementedError):
        len(StreamPackingSampler(GRAPHS, 3, 8, base_sampler=torch.utils.data.RandomSampler(GRAPHS)))
    loader = pg.FixedSizeDataLoader(
        GRAPHS, 4, fixed_size_options=pg.FixedSizeOptions(9, 9, 4),
        fixed_size_strategy=pg.FixedSizeStrategy.StreamPack,
    )  # fmt: skip
    assert [int(batch.graphs_mask.sum()) for batch in loader] == [2, 2, 2, 2, 1]


class Network(nn.Module):
    """A layer of sums over neighbours, and a sum over each graph."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.graphs = nn.Linear(2, 1), graphs

    def forward(self, batch):
        source, target = batch.edge_index
        x = batch.x.index_add(0, target, batch.x[source] * batch.edge_attr)
        nodes = self.layer(x)[:, 0]
        out = nodes.new_zeros(self.graphs).index_add(0, batch.batch, nodes)
        error = (out - batch.y).square() * batch.graphs_mask
        return out, poptorch.identity_loss(error.sum(), "none")


def test_a_network_trains_on_padded_batches_as_on_the_graphs_alone() -> None:
    opts = options(accumulation=3)
    model, eager = Network(4), Network(3)
    trainer = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.001))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.001)
    losses = [trainer(batch)[1] for batch in pg.FixedSizeDataLoader(GRAPHS, 4, options=opts)]
    assert len(losses) == 1
    for at in range(0, 9, 3):
        real = Batch.from_data_list(GRAPHS[at : at + 3])
        real.graphs_mask = torch.ones(3, dtype=torch.bool)
        _, loss = eager(real)
        (loss / 3).backward()
    optimizer.step()
    torch.testing.assert_close(losses[0], loss.detach())
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_graphs_are_arguments_and_results() -> None:
    class Doubling(nn.Module):
        def forward(self, data):
            data = data.clone()
            data.x = data.x * 2
            return data

    loader = DataLoader(GRAPHS[:4], batch_size=2, options=options())
    for batch in loader:
        out = poptorch.inferenceModel(Doubling(), options())(batch)
        assert isinstance(out, Batch)
        assert torch.equal(out.x, batch.x * 2)
        assert torch.equal(out.ptr, batch.ptr.int())


def test_a_default_for_an_attribute_that_does_not_exist_is_said(caplog) -> None:
    for defaults, count in (({"y": 7, "label": 1}, 1), ({"y": 7}, 0)):
        collate = FixedSizeCollater(pg.FixedSizeOptions(9, 9, 2, pad_graph_defaults=defaults))
        caplog.clear()
        for _ in range(2):
            assert collate([GRAPHS[0]]).y.tolist() == [0, 7]
        assert caplog.text.count("do not have: label; they have") == count
