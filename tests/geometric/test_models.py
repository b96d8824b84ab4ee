"""Layers and models of PyTorch Geometric, and its operators, on batches of one size."""

import contextlib
import copy
import warnings
from concurrent import futures

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data
from torch_geometric.experimental import is_experimental_mode_enabled, set_experimental_mode
from torch_geometric.nn.pool.knn import L2KNNIndex  # noqa: F401 (imported, as programs may)
from torch_geometric.utils import scatter

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.cases import few, long
from helpers.closeness import near
from helpers.wrapping import Calling, agrees, infer, options, training, trains_alike
from poptorch_geometric import _substitution, ops
from poptorch_geometric.masker import LayerMasker, Masker, NoMasker, PreLayerMasker


def molecules(count: int = 9) -> list[Data]:
    generator, samples = torch.Generator().manual_seed(3), made.graphs(count)
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
    trainer, optimizer = training(model, opts, 0.01), torch.optim.SGD(eager.parameters(), lr=0.01)
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
    pool, layer = kind(2, ratio=ratio, min_score=least), pyg.GraphConv(2, 3)

    def network(x, edge_index, numbers):
        x, edge_index, _, numbers, chosen, _ = pool(x, edge_index, batch=numbers)
        return pyg.global_add_pool(layer(x, edge_index), numbers, 3), chosen, numbers

    inputs = (batch.x, batch.edge_index, batch.batch)
    expected, theirs, _ = network(*inputs)
    out, chosen, numbers = infer(network, *inputs)
    torch.testing.assert_close(out, expected.detach(), **near(24, 3))
    assert (len(chosen), chosen[: len(theirs)].tolist()) == (batch.num_nodes, theirs.tolist())
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


POINTS, OTHERS = torch.rand(20, 3), torch.rand(7, 3)
GROUPS = torch.tensor([0] * 12 + [1] * 2 + [2] * 6)
OTHER_GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 2])


def brute(x, y, batch_x, batch_y, keep) -> set[tuple[int, int]]:
    """Pairs (of y, of x) that a function of one row of distances keeps."""
    pairs = set()
    for at in range(len(y)):
        same = (batch_x == batch_y[at]).nonzero()[:, 0]
        pairs |= {(at, int(same[i])) for i in keep((x[same] - y[at]).norm(dim=1))}
    return pairs


def close(apart) -> list[int]:
    return (apart <= 0.5).nonzero()[:, 0].tolist()


def pairs_of(pairs: torch.Tensor) -> set[tuple[int, int]]:
    return {(a, b) for a, b in pairs.t().tolist() if a >= 0}


@pytest.mark.spec("geometric", 85)
def test_nearest_points_come_first_and_missing_ones_are_marked() -> None:
    near = ops.knn(POINTS, OTHERS, 4, GROUPS, OTHER_GROUPS)
    assert near.shape == (2, 28)
    expected = brute(POINTS, OTHERS, GROUPS, OTHER_GROUPS, lambda d: d.argsort()[:4].tolist())
    assert pairs_of(near) == expected
    assert ((near[0] == -1) == (near[1] == -1)).all()
    assert (near.view(2, 7, 4)[:, 2:4, 2:] == -1).all()
    assert ((POINTS[near[1]] - OTHERS[near[0]]).norm(dim=1).view(7, 4)[0].diff() >= 0).all()
    got = infer(lambda x, y: ops.knn(x, y, 4, GROUPS, OTHER_GROUPS), POINTS, OTHERS)
    assert torch.equal(got, near.int())
    same = ops.knn(torch.zeros(3), torch.zeros(2), 5)
    assert (same.view(2, 2, 5)[1, :, :3] >= 0).all()
    assert (same.view(2, 2, 5)[:, :, 3:] == -1).all()
    angles = ops.knn(POINTS, 9 * POINTS, 1, cosine=True)
    assert torch.equal(angles[0], angles[1])
    with pytest.raises(AssertionError, match="number of its example"):
        ops.knn(POINTS, OTHERS, 2, GROUPS[:3], OTHER_GROUPS)
    with pytest.raises(AssertionError, match="as many numbers"):
        ops.knn(POINTS, OTHERS[:, :2], 2)


@pytest.mark.spec("geometric", 86)
def test_points_within_a_radius() -> None:
    near = ops.radius(POINTS, OTHERS, 0.5, GROUPS, OTHER_GROUPS)
    assert near.shape == (2, 7 * 20)
    assert pairs_of(near) == brute(POINTS, OTHERS, GROUPS, OTHER_GROUPS, close)
    assert ops.radius(POINTS, OTHERS, 9.0, max_num_neighbors=2).shape == (2, 14)
    integers = ops.radius(torch.tensor([[0], [3]]), torch.tensor([[1]]), 1.5)
    assert integers.tolist() == [[0, -1], [0, -1]]
    edges = ops.radius_graph(POINTS, 0.5, GROUPS)
    pairs = brute(POINTS, POINTS, GROUPS, GROUPS, close)
    assert pairs_of(edges.flip(0)) == {(a, b) for a, b in pairs if a != b}


@pytest.mark.spec("geometric", 87)
@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_graphs_of_nearest_points(loop: bool, flow: str) -> None:
    edges = ops.knn_graph(POINTS, 3, GROUPS, loop=loop, flow=flow)
    assert edges.shape == (2, 60)
    centre, near = edges.flip(0) if flow == "source_to_target" else edges
    ranks = slice(0, 3) if loop else slice(1, 4)
    expected = brute(POINTS, POINTS, GROUPS, GROUPS, lambda d: d.argsort()[ranks].tolist())
    assert pairs_of(torch.stack([centre, near])) == expected
    with pytest.raises(AssertionError, match="Unknown flow"):
        ops.knn_graph(POINTS, 3, flow="up")


@pytest.mark.spec("geometric", 88)
def test_interpolated_features() -> None:
    x = torch.rand(20, 5, requires_grad=True)
    groups, others = torch.tensor([0] * 12 + [1] * 8), torch.tensor([0, 0, 1, 1, 1, 1, 1])
    out = ops.knn_interpolate(x, POINTS, OTHERS, groups, others, k=3)
    near = ops.knn(POINTS, OTHERS, 3, groups, others)
    weights = 1 / (POINTS[near[1]] - OTHERS[near[0]]).square().sum(-1, keepdim=True).clamp(1e-16)
    expected = scatter(x[near[1]] * weights, near[0], 0, 7) / scatter(weights, near[0], 0, 7)
    torch.testing.assert_close(out, expected)
    assert torch.autograd.grad(out.sum(), x)[0].any()
    alone = ops.knn_interpolate(x, POINTS, OTHERS, GROUPS, torch.full((7,), 5))
    assert torch.equal(alone, torch.zeros(7, 5))
    assert ops.knn_interpolate(x, POINTS, OTHERS, GROUPS, OTHER_GROUPS).isfinite().all()
    got = agrees(lambda x: ops.knn_interpolate(x, POINTS, OTHERS, groups, others), x.detach())
    torch.testing.assert_close(got, out.detach())


GRAPH = made.random_graph(12, 30)
KINDS = torch.arange(12) % 3
CASES = {
    "HeteroLinear": (ops.HeteroLinear(4, 5, 3), (GRAPH.x, KINDS)),
    "MFConv": (ops.MFConv(4, 5, max_degree=3), (GRAPH.x, GRAPH.edge_index)),
    "ClusterGCNConv": (ops.ClusterGCNConv(4, 5, 0.5), (GRAPH.x, GRAPH.edge_index)),
    "InstanceNorm of all": (ops.InstanceNorm(4, affine=True), (GRAPH.x,)),
    "InstanceNorm that remembers": (ops.InstanceNorm(4, affine=True, track_running_stats=True),
                                    (GRAPH.x, KINDS.sort()[0], 3)),
}  # fmt: skip


@pytest.mark.spec("geometric", 89)
@pytest.mark.parametrize("name", CASES)
def test_layers_give_torch_geometrics_values(name: str) -> None:
    layer, inputs = CASES[name]
    theirs = getattr(pyg, type(layer).__name__)
    theirs(*(4, 5, 3)[: 1 if "Norm" in name else 3])  # which compiles its methods
    original = copy.deepcopy(layer)
    original.__class__ = theirs
    torch.testing.assert_close(copy.deepcopy(layer)(*inputs), copy.deepcopy(original)(*inputs))
    # Both ours and torch_geometric's own class work in wrapped models.
    for kind in (type(layer), theirs):
        model, eager = (made.Layer(copy.deepcopy(each), *inputs[2:]) for each in (layer, original))
        model.layer.__class__ = kind
        trains_alike(model, *inputs[:2], eager=eager)
        if "remembers" in name:
            evaluated = poptorch.inferenceModel(model.layer.eval(), options())(*inputs)
            torch.testing.assert_close(evaluated, eager.layer.eval()(*inputs).detach())


def test_sorted_numbers_are_taken_at_their_word() -> None:
    unsorted = torch.tensor([1, 0])
    assert ops.Aggregation().assert_sorted_index(unsorted) is None
    with pytest.raises(ValueError, match="not sorted"):
        pyg.aggr.Aggregation().assert_sorted_index(unsorted)
    aggregation = pyg.aggr.SortAggregation(k=2)
    numbers, x = torch.tensor([0, 0, 0, 1, 1]), torch.rand(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = infer(lambda x: aggregation(x, numbers, dim_size=2, max_num_elements=4), x)
    torch.testing.assert_close(out, aggregation(x, numbers, dim_size=2))


LARGE = made.random_graph()
BATCH = (LARGE.x, LARGE.edge_index)
FAR = 9.0  # only shapes are compared


class Convolutions(torch.nn.Module):
    """One layer; what it adds can differ between two copies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.more = pyg.SAGEConv(4, 3), 0.0

    def forward(self, x, edge_index):
        out = self.layer(x, edge_index) + self.more
        return out, poptorch.identity_loss(out.square(), "mean")


@pytest.mark.slow
@pytest.mark.spec("geometric", 91)
def test_the_stepper_compares_training() -> None:
    stepper = pg.TrainingStepper(Convolutions(), options=options(), **near(24, 4))
    stepper.run(4, BATCH)
    stepper.run_inference(BATCH)
    longer = (torch.cat([LARGE.x, LARGE.x[:3]]), LARGE.edge_index)
    pg.TrainingStepper(Convolutions(), options=options(), rtol=FAR, atol=FAR).run(1, BATCH, longer)
    assert set(stepper.benchmark(2, BATCH, ("ipu", "cpu"))) == {"ipu_time", "cpu_time"}
    with pytest.raises(NotImplementedError, match="on a GPU"):
        stepper.benchmark(2, BATCH, ("gpu",))


def test_the_stepper_turns_exceptions_on() -> None:
    class Dividing(Convolutions):
        def forward(self, x, edge_index):
            out, loss = super().forward(x, edge_index)
            return out / (0 * out), loss

    with pytest.raises(poptorch.Error, match="Floating-point exception: division by zero"):
        pg.TrainingStepper(Dividing(), options=options()).ipu_step(BATCH)
    quiet = pg.TrainingStepper(Dividing(), options=options(), enable_fp_exception=False)
    assert not quiet.ipu_step(BATCH)[0].isfinite().any()


@pytest.mark.spec("geometric", 91)
def test_the_stepper_names_what_differs() -> None:
    stepper = pg.TrainingStepper(Convolutions(), options=options())
    stepper.cpu_model.more = 1.0
    with pytest.raises(AssertionError, match=r"^inference"):
        stepper.run_inference(BATCH)
    with pytest.raises(AssertionError, match=r"^Output"):
        stepper.run(4, BATCH)
    stepper = pg.TrainingStepper(Convolutions(), options=options())
    stepper.cpu_model.layer.lin_r.weight.detach().add_(1)
    with pytest.raises(AssertionError, match=r"^layer\.lin_r\.weight"):
        stepper.check_parameters()

    empty = pg.TrainingStepper(Calling(lambda x: (x, x)), options=options())
    assert empty.training_model is None
    empty.run_inference((LARGE.x,))
    with pytest.raises(AssertionError, match="no parameters"):
        empty.run(1, (LARGE.x,))


@pytest.mark.spec("geometric", 93)
def test_layers_aggregate_into_a_number_of_rows() -> None:
    model = torch.nn.Sequential(pyg.GINConv(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4))
    edges = torch.tensor([[0, 1], [1, 0]])

    def rows(nodes: int) -> int:
        x = torch.ones(nodes, 4)
        return len(model[0].propagate(edges, x=(x, x), size=None))

    assert rows(2) == 2
    pg.set_aggregation_dim_size(model, 7)
    assert (rows(2), rows(9)) == (7, 9)


@pytest.mark.spec("geometric", 92)
def test_maskers() -> None:
    masker, entries = NoMasker(), (torch.ones(2), torch.zeros(2))
    for name in ("node_masker", "edge_masker", "graph_masker"):
        assert getattr(masker, name)(entries, torch.ones(2)) is entries
        layer = getattr(PreLayerMasker(masker), name)(torch.add)
        assert torch.equal(layer(*entries, mask=None), torch.ones(2))
    for abstract, arguments in ((Masker, ()), (LayerMasker, (masker,))):
        with pytest.raises(TypeError):
            abstract(*arguments)

    class Zeroing(NoMasker):
        def node_masker(self, entries, mask=None):
            return tuple(entry * mask for entry in entries)

    masked = PreLayerMasker(Zeroing()).node_masker(torch.nn.Linear(2, 2, bias=False))
    assert not masked(torch.ones(2), mask=torch.zeros(2)).any()
