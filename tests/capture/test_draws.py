"""What a micro-batch draws does not depend on what runs beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.cases import long
from helpers.device_draws import follow
from helpers.wrapping import Calling, options
from poptorch._session.random import first_state

SEED, STEPS = 5, 4


def draws(x):
    """Everything that lanes can draw."""
    drawn = (
        F.dropout(x, 0.5), torch.bernoulli(x.sigmoid()), torch.rand(3), torch.rand_like(x.t()),
        x.new_empty(4).uniform_(-1, 1), torch.randn(17), torch.randn_like(x),
        x.new_empty(2, 3).normal_(1, 2), torch.randint(9, (3,)), torch.randint(-9, 9, (3,)),
        torch.randint_like(x, 9), torch.randint_like(x, -9, 9), x.new_empty(3).exponential_(2),
    )  # fmt: skip
    return torch.cat([each.float().flatten() for each in drawn])[None]


def apart(x):
    """What lanes cannot draw."""
    return torch.poisson(x.exp())


def drawn(model: nn.Module, lanes: int, replicas: int, backend: str) -> tuple[torch.Tensor, bool]:
    """Return what two calls draw, and whether micro-batches ran side by side."""
    opts = options(backend, iterations=STEPS, replicas=replicas).randomSeed(SEED)
    inference = poptorch.inferenceModel(model, opts.lanes(lanes))
    x = torch.linspace(-1, 1, STEPS * replicas * 2 * 5).reshape(-1, 5)
    results = torch.stack([inference(x), inference(x)])
    side_by_side = inference.plan().program.lanes is not None
    inference.destroy()
    return results, side_by_side


def expected(model: nn.Module, replicas: int) -> torch.Tensor:
    """Return what eager torch draws when it is seeded as the device is."""
    seeds = follow(first_state(SEED), 1, replicas)
    x = torch.linspace(-1, 1, STEPS * replicas * 2 * 5).reshape(-1, 2, 5)
    with torch.no_grad():
        results = [model(rows) for _ in range(2) for rows, _ in zip(x, seeds, strict=False)]
    return torch.stack(results).reshape(2, -1, *results[0].shape[1:])


@pytest.mark.parametrize(
    "function, lanes, replicas, backend",
    [
        (draws, 1, 1, "reference"),
        (draws, 0, 1, "reference"),
        (draws, 4, 2, "reference"),
        (apart, 0, 1, "reference"),
        long(draws, 4, 2, "inductor"),
    ],
)
def test_micro_batches_draw_alike_one_after_another_and_side_by_side(
    function, lanes: int, replicas: int, backend: str
) -> None:
    model = Calling(function)
    results, side_by_side = drawn(model, lanes, replicas, backend)
    assert side_by_side == (lanes != 1 and function is draws)
    torch.testing.assert_close(results, expected(model, replicas))
