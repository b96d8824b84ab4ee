"""Half precision in lanes: sums of gradients keep float32's range, running values round once."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options

COUNT = 4
"""Micro-batches."""
ROWS = 2
"""Rows of a micro-batch."""
LARGEST = torch.finfo(torch.float16).max


class Factor(nn.Module):
    """A trainable factor for each of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class First(nn.GRU):
    """A recurrent layer without its last state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = super().forward(x)
        return out


LAYERS = {
    "a factor": (Factor, (4,)),
    "a layer": (lambda: nn.Linear(4, 4), (4,)),
    "two layers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (4,)),
    "a convolution": (lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3)), (2, 8)),
    "an embedding": (lambda: nn.Embedding(4, 4), (3,)),
    "a layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), (4,)),
    "a group norm": (lambda: nn.GroupNorm(1, 4), (4, 3)),
    "a recurrent layer": (lambda: First(4, 4, batch_first=True), (3, 4)),
    "many layers": (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))), (4,)),
}
"""Layers, and the shape of a row."""


def loss_of(model: Having, x: torch.Tensor) -> torch.Tensor:
    return poptorch.identity_loss((model.layer(x).float() * model.size).mean(), "none")


def model_and_batch(name: str) -> tuple[Having, torch.Tensor]:
    """A model of one of the layers in half, and a batch whose micro-batches are equal."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model = Having(loss_of, layer=make().half())
    if name == "an embedding":
        return model, torch.zeros(COUNT * ROWS, *shape, dtype=torch.int32)
    return model, normal(ROWS, *shape).abs().half().repeat(COUNT, *[1] * len(shape))


def scaled_to_the_edge(model: Having, batch: torch.Tensor) -> None:
    """Let the largest gradient of one micro-batch be half of what half can hold."""
    model.size = 1.0
    largest = 0.0
    for weight in torch.autograd.grad(model(batch[:ROWS]), [*model.parameters()]):
        largest = max(largest, float(weight.abs().max()))
    model.size = 0.5 * LARGEST / largest


Weights = dict[str, torch.Tensor]


def trained(model: Having, batch: torch.Tensor, lanes: int, **counts: int) -> Weights:
    """Weights after one update of a copy of the model.

    Args:
        model: what is trained.
        batch: all micro-batches.
        lanes: how many micro-batches run side by side; 0 for all of them.
        counts: of micro-batches, by their kind.
    """
    model = copy.deepcopy(model)
    opts = options(**counts).lanes(lanes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    wrapped(batch)
    wrapped.copyWeightsToHost()
    side_by_side = wrapped._session.now.compiled.plan.program.lanes
    assert (side_by_side.count if side_by_side else 1) == (1 if lanes else COUNT)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["accumulation", "replicas"])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_of_half_gradients_do_not_overflow(name: str, axis: str) -> None:
    model, batch = model_and_batch(name)
    scaled_to_the_edge(model, batch)

    in_lanes = trained(model, batch, lanes=0, **{axis: COUNT})
    in_turn = trained(model, batch, lanes=1, **{axis: COUNT})

    assert all(weight.isfinite().all() for weight in in_turn.values())
    torch.testing.assert_close(in_lanes, in_turn, rtol=2**-9, atol=2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_running_values_are_as_close_to_the_exact_values_as_those_of_eager(
    dtype: torch.dtype, momentum: float
) -> None:
    def averaged(model: Having, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.mean.mul_(momentum).add_(x.mean(0).to(model.mean.dtype), alpha=1 - momentum)
        return poptorch.identity_loss((x * model.weight * model.mean).float().mean(), "none")

    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    model = Having(averaged, weight=weight, mean=normal(4).abs().to(dtype))
    eager = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    batch = normal(32, 4, seed=1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    wrapped = poptorch.trainingModel(model, options(accumulation=16), optimizer)
    wrapped(batch)
    wrapped.copyWeightsToHost()
    for piece in batch.chunk(16):
        eager(piece)
        exact(piece.double())

    assert wrapped._session.now.compiled.plan.program.lanes.count == 16

    def error(other: Having) -> float:
        return float((other.mean.double() - exact.mean).abs().max())

    assert error(model) <= error(eager)
