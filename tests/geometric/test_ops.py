"""Operators on points, the stepper that compares, hooks on layers, maskers."""

import copy
import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.pool.knn import L2KNNIndex  # noqa: F401 (imported, as programs may)
from torch_geometric.utils import scatter

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.closeness import near
from helpers.wrapping import Calling, agrees, infer, options, trains_alike
from poptorch_geometric import ops
from poptorch_geometric.masker import LayerMasker, Masker, NoMasker, PreLayerMasker

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
    apart = (POINTS[near[1]] - OTHERS[near[0]]).norm(dim=1).view(7, 4)
    assert (apart[0].diff() >= 0).all()
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
TYPES = torch.arange(12) % 3
CASES = {
    "HeteroLinear": (ops.HeteroLinear(4, 5, 3), (GRAPH.x, TYPES)),
    "MFConv": (ops.MFConv(4, 5, max_degree=3), (GRAPH.x, GRAPH.edge_index)),
    "ClusterGCNConv": (ops.ClusterGCNConv(4, 5, 0.5), (GRAPH.x, GRAPH.edge_index)),
    "InstanceNorm of all": (ops.InstanceNorm(4, affine=True), (GRAPH.x,)),
    "InstanceNorm that remembers": (ops.InstanceNorm(4, affine=True, track_running_stats=True),
                                    (GRAPH.x, TYPES.sort()[0], 3)),
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
    numbers = torch.tensor([0, 0, 0, 1, 1])
    x = torch.rand(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = infer(lambda x: aggregation(x, numbers, dim_size=2, max_num_elements=4), x)
    torch.testing.assert_close(out, aggregation(x, numbers, dim_size=2))


LARGE = made.random_graph()
BATCH = (LARGE.x, LARGE.edge_index)
FAR = 9.0  # only shapes are compared


class Network(torch.nn.Module):
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
    stepper = pg.TrainingStepper(Network(), options=options(), **near(24, 4))
    stepper.run(4, BATCH)
    stepper.run_inference(BATCH)
    longer = (torch.cat([LARGE.x, LARGE.x[:3]]), LARGE.edge_index)
    pg.TrainingStepper(Network(), options=options(), rtol=FAR, atol=FAR).run(1, BATCH, longer)
    assert set(stepper.benchmark(2, BATCH, ("ipu", "cpu"))) == {"ipu_time", "cpu_time"}
    with pytest.raises(NotImplementedError, match="on a GPU"):
        stepper.benchmark(2, BATCH, ("gpu",))


def test_the_stepper_turns_exceptions_on() -> None:
    class Dividing(Network):
        def forward(self, x, edge_index):
            out, loss = super().forward(x, edge_index)
            return out / (0 * out), loss

    with pytest.raises(poptorch.Error, match="Floating-point exception: division by zero"):
        pg.TrainingStepper(Dividing(), options=options()).ipu_step(BATCH)
    quiet = pg.TrainingStepper(Dividing(), options=options(), enable_fp_exception=False)
    assert not quiet.ipu_step(BATCH)[0].isfinite().any()


@pytest.mark.spec("geometric", 91)
def test_the_stepper_names_what_differs() -> None:
    stepper = pg.TrainingStepper(Network(), options=options())
    stepper.cpu_model.more = 1.0
    with pytest.raises(AssertionError, match=r"^inference"):
        stepper.run_inference(BATCH)
    with pytest.raises(AssertionError, match=r"^Output"):
        stepper.run(4, BATCH)
    stepper = pg.TrainingStepper(Network(), options=options())
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
