"""Networks on padded batches against the same, eager, on graphs alone; what is swapped for it."""

import contextlib
import copy
from concurrent import futures

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data
from torch_geometric.experimental import is_experimental_mode_enabled, set_experimental_mode

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.cases import few, long
from helpers.closeness import near
from helpers.wrapping import Calling, infer, options, training, trains_alike
from poptorch_geometric import _substitution


def molecules(count: int = 9) -> list[Data]:
    generator = torch.Generator().manual_seed(3)
    samples = made.graphs(count)
    for sample in samples:
        sample.x = torch.randn(sample.x.shape, generator=generator)
        sample.y = sample.x.sum().view(1)
    return samples


class Network(torch.nn.Module):
    """Two layers of isomorphism networks with a norm, and a mean over each graph."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = pyg.GINConv(pyg.MLP([2, 8, 8], norm=None))
        self.attention = pyg.GATConv(8, 4, heads=2)
        self.head, self.graphs = torch.nn.Linear(8, 1), graphs

    def forward(self, batch):
        x = self.convolution(batch.x, batch.edge_index).relu()
        x = self.attention(x, batch.edge_index).relu()
        out = self.head(pyg.global_mean_pool(x, batch.batch, self.graphs))[:, 0]
        error = torch.where(batch.graphs_mask, (out - batch.y).square(), 0.0)
        return out, poptorch.identity_loss(error.sum() / sum(batch.graphs_mask), "none")


@pytest.mark.slow
@pytest.mark.spec("geometric", 81)
def test_training_on_padded_batches_is_training_on_the_graphs() -> None:
    samples, opts = molecules(), options(accumulation=3)
    model, eager = Network(4), Network(3)
    trainer = training(model, opts, 0.01)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    (batch,) = pg.FixedSizeDataLoader(samples, 4, options=opts)
    for _ in range(3):
        _, loss = trainer(batch)
        optimizer.zero_grad()
        for at in range(0, 9, 3):
            real = Batch.from_data_list(samples[at : at + 3])
            real.graphs_mask = torch.ones(3, dtype=torch.bool)
            _, expected = eager(real)
            (expected / 3).backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), **near(24, 3))
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(24, 3))


LOOPED = torch.tensor([[0, 1, 2, 2, 3, 1], [1, 1, 0, 2, 3, 0]])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5, 0.7])
FEATURES = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
TYPES = torch.tensor([0, 1, 2, 0, 1, 2])
# Lists of edges that eager torch_geometric shortens: what is gone must not count.
SHRINKING = {
    "GCN": (pyg.GCNConv(4, 3), (FEATURES, LOOPED, WEIGHTS)),
    "improved GCN": (pyg.GCNConv(4, 3, improved=True), (FEATURES, LOOPED)),
    "GAT": (pyg.GATConv(4, 3, edge_dim=1, fill_value="mean"), (FEATURES, LOOPED, WEIGHTS)),
    "GATv2": (pyg.GATv2Conv(4, 3), (FEATURES, LOOPED)),
    "Cheb": (pyg.ChebConv(4, 3, 2), (FEATURES, LOOPED, WEIGHTS)),
    "RGCN": (pyg.RGCNConv(4, 3, 3), (FEATURES, LOOPED, TYPES)),
    "FiLM": (pyg.FiLMConv(4, 3, 2), (FEATURES, LOOPED, TYPES % 2)),
    "EG": (pyg.EGConv(4, 4, ["symnorm"], 2), (FEATURES, LOOPED)),
}


@pytest.mark.spec("geometric", 82)
@pytest.mark.parametrize("name", few(SHRINKING, "GCN", "GAT", "RGCN"))
def test_edges_that_are_gone_do_not_count(name: str) -> None:
    layer, inputs = SHRINKING[name]
    trains_alike(made.Layer(layer), *inputs)


@pytest.mark.parametrize("kind, ratio, least", [
    (pyg.TopKPooling, 0.5, None), (pyg.TopKPooling, 0.5, 0.3), (pyg.SAGPooling, 2, None),
])  # fmt: skip
def test_pooling_of_the_best_nodes_has_an_upper_bound(kind, ratio, least) -> None:
    batch = Batch.from_data_list(molecules(3))
    torch.manual_seed(1)
    pool = kind(2, ratio=ratio, min_score=least)
    layer = pyg.GraphConv(2, 3)

    def network(x, edge_index, numbers):
        x, edge_index, _, numbers, chosen, _ = pool(x, edge_index, batch=numbers)
        return pyg.global_add_pool(layer(x, edge_index), numbers, 3), chosen, numbers

    inputs = (batch.x, batch.edge_index, batch.batch)
    expected, theirs, _ = network(*inputs)
    out, chosen, numbers = infer(network, *inputs)
    torch.testing.assert_close(out, expected.detach(), **near(24, 3))
    assert len(chosen) == batch.num_nodes
    assert chosen[: len(theirs)].tolist() == theirs.tolist()
    assert (chosen[len(theirs) :] == -1).all()
    assert ((numbers < 0) == (chosen < 0)).all()


def test_dropped_edges_have_an_upper_bound() -> None:
    graph = made.random_graph()

    def drop(edge_index, undirected=False):
        return torch_geometric.utils.dropout_edge(edge_index, p=0.5, force_undirected=undirected)

    edges, kept = infer(drop, graph.edge_index)
    assert edges.shape == graph.edge_index.shape
    assert 0.3 < kept.float().mean() < 0.7
    assert torch.equal(edges[:, kept], graph.edge_index[:, kept].int())
    assert (edges[:, ~kept] == -1).all()
    both, numbers = infer(lambda e: drop(e, True), graph.edge_index)
    there = both[0] >= 0
    assert torch.equal(both[:, there], torch.cat(
        [graph.edge_index[:, numbers[: graph.num_edges][there[: graph.num_edges]].long()],
         graph.edge_index[:, numbers[graph.num_edges :][there[graph.num_edges :]].long()].flip(0)],
        dim=1).int())  # fmt: skip


@pytest.mark.slow
@pytest.mark.spec("geometric", 90)
@pytest.mark.parametrize("name", [long("HeteroConv"), long("HANConv"), "HGTConv", "to_hetero"])
def test_dicts_of_types(name: str) -> None:
    data = made.hetero_graph()
    torch.manual_seed(0)
    metadata = data.metadata()
    model: torch.nn.Module
    if name == "HeteroConv":
        model = pyg.HeteroConv({kind: pyg.SAGEConv((-1, -1), 5) for kind in metadata[1]}, "sum")
    elif name == "to_hetero":
        model = pyg.to_hetero(pyg.GraphSAGE((-1, -1), 5, 2, 3), metadata)
    else:
        model = getattr(pyg, name)({"v0": 2, "v1": 3}, 6, metadata, heads=2)
    inputs = data.x_dict, data.edge_index_dict
    expected = model(*inputs)  # which makes lazy weights, too
    out = poptorch.inferenceModel(copy.deepcopy(model), options())(*inputs)
    assert list(out) == list(expected)
    for kind in out:
        torch.testing.assert_close(out[kind], expected[kind].detach(), **near(24, 3))


FLAG = "disable_dynamic_shapes"


def swapped() -> list[object]:
    """Everything that may be swapped, as it is now."""
    functions = [vars(owner)[name] for owner, name, _ in _substitution._places(0)]
    return functions + [vars(owner)[name] for owner, name, _ in _substitution.METHODS]


def elsewhere() -> tuple[object, ...]:
    """What a thread finds that has nothing to do with a capture."""
    edges, _ = torch_geometric.utils.remove_self_loops(torch.tensor([[0, 1, 2], [0, 2, 2]]))
    checked = torch.distributions.Bernoulli(0.5)._validate_args
    return is_experimental_mode_enabled(FLAG), edges.tolist(), checked


@pytest.mark.spec("geometric", 83)
def test_aggregations_need_the_number_of_rows() -> None:
    aggregation, numbers = pyg.SumAggregation(), torch.tensor([0, 0, 1])
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="Argument 'dim_size' needs to be set"):
        infer(lambda x: aggregation(x, numbers), x)
    assert aggregation(x, numbers).tolist() == [[2, 2], [1, 1]]
    assert infer(lambda x: aggregation(x, numbers, dim_size=2), x).tolist() == [[2, 2], [1, 1]]
    with pytest.raises(poptorch.Error):
        infer(lambda x, numbers: pyg.global_mean_pool(x, numbers), x, numbers)


@pytest.mark.spec("geometric", 84)
@pytest.mark.parametrize("flag, fails", [(False, True), (True, False)])
def test_everything_is_as_before_afterwards(flag: bool, fails: bool) -> None:
    inside = []

    def forward(x):
        inside.extend([is_experimental_mode_enabled(FLAG), torch_geometric.utils.scatter])
        with futures.ThreadPoolExecutor(1) as threads:
            inside.append(threads.submit(elsewhere).result())
        if fails:
            raise KeyError("a fault of the model")
        return x + 1

    before, usual = swapped(), elsewhere()
    with set_experimental_mode(flag, FLAG):
        model = poptorch.inferenceModel(Calling(forward), options())
        with pytest.raises(KeyError, match="a fault") if fails else contextlib.nullcontext():
            model(torch.ones(2))
        assert is_experimental_mode_enabled(FLAG) == flag
    assert inside[0] is True
    assert inside[1] is not torch_geometric.utils.scatter
    assert inside[2][1:] == usual[1:]
    assert inside[2][0] is False
    assert all(now is then for now, then in zip(swapped(), before, strict=True))
    assert len(before) > 50


def test_neighbours_are_found_inside_models_and_missing_ones_send_nothing() -> None:
    torch.manual_seed(0)
    layer = pyg.EdgeConv(torch.nn.Linear(6, 4), aggr="sum")
    points, numbers = torch.rand(5, 3), torch.tensor([0, 0, 0, 1, 1])
    full = [(a, b) for a in range(5) for b in range(5) if a != b and numbers[a] == numbers[b]]
    expected = layer(points, torch.tensor(full).t())
    got = infer(lambda x: layer(x, pyg.knn_graph(x, 2, numbers)), points)
    torch.testing.assert_close(got, expected.detach())
    assert infer(lambda x: pyg.radius_graph(x, 0.4, max_num_neighbors=4), points).shape == (2, 20)
