"""Train eager PyTorch with the random numbers of the compiled program, and compare.

The program seeds torch's generator for each micro-batch, or one generator for each lane. Seeded
alike, eager torch draws the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import poptorch
from helpers.wrapping import options
from poptorch._ops import random_streams
from poptorch._ops.draws import Draw, drawing


@contextlib.contextmanager
def noted_seeds() -> Iterator[list[int]]:
    """Yield the seeds of all micro-batches that run within the block, as they come."""
    seeds: list[int] = []
    usual = random_streams.begin

    def begin(given: Any) -> None:
        seeds.extend(given)
        usual(given)

    with mock.patch.object(random_streams, "begin", begin):
        yield seeds


def draws_of(executor: poptorch.PoplarExecutor) -> list[Draw]:
    """Return the draws of the whole step, in the order of its graph."""
    graph = executor.plan().program.graphs["step"].module.graph
    return [draw for _, draw in drawing(graph)]


def trains_alike(
    model: nn.Module,
    eager: nn.Module,
    *inputs: torch.Tensor,
    opts: poptorch.Options | None = None,
    accumulation: int = 1,
) -> poptorch.PoplarExecutor:
    """Do two updates of both, each with its own draws of the program, and compare the weights."""
    opts = opts or options()
    opts.Training.gradientAccumulation(accumulation)
    plain = torch.optim.SGD(eager.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, opts, optimizer)
    executor.compile(*inputs)
    parts = list(zip(*(x.chunk(accumulation) for x in inputs), strict=True))
    for _ in range(2):
        with noted_seeds() as seeds:
            executor(*inputs)
        plain.zero_grad()
        for at, part in enumerate(parts):
            if seeds:
                torch.manual_seed(seeds[at])
            eager(*part).backward()
        for weight in filter(lambda p: p.grad is not None, eager.parameters()):
            weight.grad /= accumulation
        plain.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    return executor
