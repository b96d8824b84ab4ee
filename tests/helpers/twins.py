"""The same training twice, in eager torch and wrapped."""

import copy

import torch

import poptorch
from helpers.wrapping import options


class Twins:
    """A model and its copy, an optimizer for each, and the executor of the one.

    The model returns a loss, or something and then its loss. ``close`` says how near losses and
    states are; with an ``rtol`` of 0, weights too.
    """

    def __init__(self, model, make, opts=None, **close) -> None:
        self.model, self.eager = model, copy.deepcopy(model)
        self.theirs, self.ours = (make(m.parameters()) for m in (self.eager, self.model))
        self.wrapped = poptorch.trainingModel(self.model, opts or options(), self.ours)
        self.close = close or {"rtol": 0, "atol": 0}

    @property
    def both(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.theirs, self.ours

    def eager_step(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Make a step in eager torch; return the loss."""
        self.theirs.zero_grad()
        result = self.eager(*inputs)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result[-1]
        loss.backward()
        self.theirs.step()
        return loss.detach()

    def step(self, *inputs: torch.Tensor, count: int = 1) -> None:
        """Make steps of both; compare their losses."""
        for _ in range(count):
            result = self.wrapped(*inputs)
            got = result if isinstance(result, torch.Tensor) else result[-1]
            torch.testing.assert_close(got, self.eager_step(*inputs), **self.close)

    def train(self, mode: bool) -> None:
        for model in (self.model, self.eager):
            model.train(mode)

    def compare(self) -> None:
        """Compare weights, buffers and the states of the optimizers."""
        near = {} if self.close["rtol"] else self.close
        torch.testing.assert_close(self.model.state_dict(), self.eager.state_dict(), **near)
        theirs, ours = (optimizer.state_dict()["state"] for optimizer in self.both)
        for at, entry in theirs.items():
            there = {name: value for name, value in entry.items() if value is not None}
            torch.testing.assert_close({n: ours[at][n] for n in there}, there, **self.close)
