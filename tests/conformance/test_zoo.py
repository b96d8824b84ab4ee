"""Every model of the zoo computes what the eager loop computes, in training and inference."""

import copy

import pytest
import torch

import poptorch
from helpers import wrapping
from helpers.closeness import near, relative
from helpers.device_draws import follow
from helpers.zoo import ROWS, ZOO
from poptorch._session.random import first_state

SEED = 5
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def options(**counts: int) -> poptorch.Options:
    return wrapping.options(**counts).randomSeed(SEED)


def eager_steps(model, optimizer, x, y, accumulation, draws):
    """The loop that a user would write; returns the losses of all micro-batches.

    ``draws`` seeds torch for each of them.
    """
    losses = []
    for chunk in range(0, len(x), ROWS * accumulation):
        optimizer.zero_grad()
        for at in range(chunk, chunk + ROWS * accumulation, ROWS):
            next(draws)
            _, loss = model(x[at : at + ROWS], y[at : at + ROWS])
            (loss / accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses)


def compare(name: str, optimizer: str, accumulation: int, steps: int, **apart: float) -> None:
    torch.manual_seed(0)
    model = ZOO[name].build()
    eager = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[optimizer](net.parameters()) for net in (model, eager))
    opts = options(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, opts, ours)
    draws = follow(first_state(SEED), accumulation)
    for _ in range(steps):
        x, y = ZOO[name].inputs(ROWS * accumulation)
        expected = eager_steps(eager, theirs, x, y, accumulation, draws)
        torch.testing.assert_close(training(x, y)[1].reshape(-1), expected, **apart)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **apart)


@pytest.mark.parametrize("name", ZOO)
def test_training_equals_the_eager_loop(name: str) -> None:
    compare(name, "momentum", 2, 5, **near(16, 5, size=0.1))


@pytest.mark.parametrize(
    "name, optimizer",
    [("linear", "Adam"), ("tied", "momentum"), ("conv_batchnorm", "SGD"), ("transformer", "SGD")],
)
def test_training_equals_eager_bit_for_bit(name: str, optimizer: str) -> None:
    """Where the arithmetic is the same, so are the bits; of Adam it is to rounding."""
    compare(name, optimizer, 1, 3, rtol=0, atol=relative(5, 3) if optimizer == "Adam" else 0)


@pytest.mark.parametrize("name", ZOO)
def test_inference_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    example = ZOO[name]
    model = example.build().eval()
    eager = copy.deepcopy(model)
    x, y = example.inputs(ROWS * 3)
    out, losses = poptorch.inferenceModel(model, options(iterations=3))(x, y)
    with torch.no_grad():
        expected = [eager(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, len(x), ROWS)]
    torch.testing.assert_close(out, torch.cat([o for o, _ in expected]))
    torch.testing.assert_close(losses, torch.stack([loss for _, loss in expected]))
