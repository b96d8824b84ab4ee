"""The training stepper, which compares a model with its copy, and sizes of aggregations."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.closeness import near
from helpers.wrapping import Calling, options

GRAPH = made.random_graph()
BATCH = (GRAPH.x, GRAPH.edge_index)


class Convolution(torch.nn.Module):
    """One layer, and a number ``more`` that is added and can differ between two copies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = pyg.SAGEConv(4, 3)
        self.more = 0.0

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x, edge_index) + self.more
        return out, poptorch.identity_loss(out.square(), "mean")


@pytest.mark.slow
@pytest.mark.spec("geometric", 91)
def test_the_stepper_accepts_equal_training_and_inference() -> None:
    stepper = pg.TrainingStepper(Convolution(), options=options(), **near(24, 4))

    stepper.run(4, BATCH)
    stepper.run_inference(BATCH)


@pytest.mark.slow
def test_the_stepper_compares_a_larger_batch_with_its_part() -> None:
    longer = (torch.cat([GRAPH.x, GRAPH.x[:3]]), GRAPH.edge_index)
    shapes_only = {"rtol": 9.0, "atol": 9.0}
    stepper = pg.TrainingStepper(Convolution(), options=options(), **shapes_only)

    stepper.run(1, BATCH, longer)


@pytest.mark.slow
def test_the_stepper_measures_times() -> None:
    stepper = pg.TrainingStepper(Convolution(), options=options())

    times = stepper.benchmark(2, BATCH, ("ipu", "cpu"))

    assert set(times) == {"ipu_time", "cpu_time"}


def test_the_stepper_refuses_to_measure_a_gpu() -> None:
    stepper = pg.TrainingStepper(Convolution(), options=options())

    with pytest.raises(NotImplementedError, match="on a GPU"):
        stepper.benchmark(2, BATCH, ("gpu",))


class DividingByZero(Convolution):
    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, loss = super().forward(x, edge_index)
        return out / (0 * out), loss


def test_the_stepper_turns_floating_point_exceptions_on() -> None:
    stepper = pg.TrainingStepper(DividingByZero(), options=options())

    with pytest.raises(poptorch.Error, match="Floating-point exception: division by zero"):
        stepper.ipu_step(BATCH)


def test_the_stepper_leaves_floating_point_exceptions_off_if_asked() -> None:
    stepper = pg.TrainingStepper(DividingByZero(), options=options(), enable_fp_exception=False)

    out, _ = stepper.ipu_step(BATCH)

    assert not out.isfinite().any()


@pytest.fixture
def stepper() -> pg.TrainingStepper:
    return pg.TrainingStepper(Convolution(), options=options())


def test_the_stepper_says_that_inference_differs(stepper: pg.TrainingStepper) -> None:
    stepper.cpu_model.more = 1.0

    with pytest.raises(AssertionError, match=r"^inference"):
        stepper.run_inference(BATCH)


@pytest.mark.spec("geometric", 91)
def test_the_stepper_names_the_output_that_differs(stepper: pg.TrainingStepper) -> None:
    stepper.cpu_model.more = 1.0

    with pytest.raises(AssertionError, match=r"^Output"):
        stepper.run(4, BATCH)


@pytest.mark.spec("geometric", 91)
def test_the_stepper_names_the_weight_that_differs(stepper: pg.TrainingStepper) -> None:
    stepper.cpu_model.layer.lin_r.weight.detach().add_(1)

    with pytest.raises(AssertionError, match=r"^layer\.lin_r\.weight"):
        stepper.check_parameters()


@pytest.fixture
def stepper_without_weights() -> pg.TrainingStepper:
    return pg.TrainingStepper(Calling(lambda x: (x, x)), options=options())


def test_the_stepper_compares_inference_of_a_model_without_weights(
    stepper_without_weights: pg.TrainingStepper,
) -> None:
    assert stepper_without_weights.training_model is None
    stepper_without_weights.run_inference((GRAPH.x,))


def test_the_stepper_refuses_to_train_a_model_without_weights(
    stepper_without_weights: pg.TrainingStepper,
) -> None:
    with pytest.raises(AssertionError, match="no parameters"):
        stepper_without_weights.run(1, (GRAPH.x,))


@pytest.fixture
def aggregating_into_seven_rows() -> Callable[[int], int]:
    """How many rows a layer returns for a number of nodes, after seven rows were set."""
    model = torch.nn.Sequential(pyg.GINConv(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4))
    edges = torch.tensor([[0, 1], [1, 0]])

    def rows(nodes: int) -> int:
        x = torch.ones(nodes, 4)
        return len(model[0].propagate(edges, x=(x, x), size=None))

    assert rows(2) == 2
    pg.set_aggregation_dim_size(model, 7)
    return rows


@pytest.mark.spec("geometric", 93)
def test_layers_aggregate_into_the_number_of_rows_that_was_set(
    aggregating_into_seven_rows: Callable[[int], int],
) -> None:
    assert aggregating_into_seven_rows(2) == 7


def test_more_nodes_than_rows_that_were_set_keep_a_row_each(
    aggregating_into_seven_rows: Callable[[int], int],
) -> None:
    assert aggregating_into_seven_rows(9) == 9
