"""The stepper that compares, hooks on layers, maskers."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.closeness import near
from helpers.wrapping import Calling, options
from poptorch_geometric.masker import LayerMasker, Masker, NoMasker, PreLayerMasker

GRAPH = made.random_graph()
BATCH = (GRAPH.x, GRAPH.edge_index)
FAR = 9.0  # only shapes are compared


class Network(nn.Module):
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
    longer = (torch.cat([GRAPH.x, GRAPH.x[:3]]), GRAPH.edge_index)
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
    empty.run_inference((GRAPH.x,))
    with pytest.raises(AssertionError, match="no parameters"):
        empty.run(1, (GRAPH.x,))


@pytest.mark.spec("geometric", 93)
def test_layers_aggregate_into_a_number_of_rows() -> None:
    model = nn.Sequential(pyg.GINConv(nn.Linear(4, 4)), nn.Linear(4, 4))
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

    masked = PreLayerMasker(Zeroing()).node_masker(nn.Linear(2, 2, bias=False))
    assert not masked(torch.ones(2), mask=torch.zeros(2)).any()
