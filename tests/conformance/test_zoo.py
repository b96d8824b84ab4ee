"""Every model of the zoo computes what the eager loop computes, in training and inference."""

from __future__ import annotations

import copy

import pytest
import torch

import poptorch
from helpers.device_draws import follow
from helpers.zoo import ROWS, ZOO
from poptorch._session.random import first_state

STEPS = 5
SEED = 5


def options(**counts: int) -> poptorch.Options:
    opts = poptorch.Options().randomSeed(SEED).backend("reference")
    opts.showCompilationProgressBar(False)
    opts.deviceIterations(counts.get("iterations", 1))
    opts.Training.gradientAccumulation(counts.get("accumulation", 1))
    return opts


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


@pytest.mark.parametrize("name", ZOO)
def test_training_equals_the_eager_loop(name: str) -> None:
    torch.manual_seed(0)
    example, accumulation = ZOO[name], 2
    model = example.build()
    eager = copy.deepcopy(model)
    x, y = example.inputs(ROWS * accumulation * STEPS)
    opts = options(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(
        model, opts, poptorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    size = ROWS * accumulation
    parts = [training(x[i : i + size], y[i : i + size])[1] for i in range(0, len(x), size)]
    draws = follow(first_state(SEED), accumulation)
    expected = eager_steps(eager, optimizer, x, y, accumulation, draws)
    losses = torch.cat([part.reshape(-1) for part in parts])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for (key, ours), (_, theirs) in zip(
        model.state_dict().items(), eager.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


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


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@pytest.mark.parametrize(
    "name, optimizer",
    [("linear", "SGD"), ("tied", "momentum"), ("conv_batchnorm", "Adam"), ("transformer", "SGD")],
)
def test_training_equals_eager_bit_for_bit(name: str, optimizer: str) -> None:
    """Where the arithmetic is the same, so are the bits; of Adam it is to rounding."""
    torch.manual_seed(0)
    model = ZOO[name].build()
    eager = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[optimizer](net.parameters()) for net in (model, eager))
    training = poptorch.trainingModel(model, options(), ours)
    exact = {"rtol": 0, "atol": 0 if optimizer != "Adam" else 2e-6}
    for _ in range(10 if name == "linear" else 2):
        x, y = ZOO[name].inputs(ROWS)
        expected = eager_steps(eager, theirs, x, y, 1, follow(first_state(SEED)))
        torch.testing.assert_close(training(x, y)[1], expected[0], **exact)
    if optimizer != "Adam":
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), **exact)
