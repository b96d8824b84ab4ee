"""A model trained or run with any options, and the loop of eager torch that does the same."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import poptorch
from helpers import wrapping

ROWS = 4  # of a micro-batch
Batch = tuple[torch.Tensor, ...]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    # With a smaller eps rounding decides in which direction a weight without gradient goes.
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.01, weight_decay=0.1),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is used."""

    training: bool = True
    lanes: int = 0
    accumulation: int = 1
    replicas: int = 1
    iterations: int = 1
    mode: str = "All"
    reduction: str = "Mean"
    strategy: str = "Post"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    backend: str = "reference"

    @property
    def rows(self) -> int:
        """Of the batch of a call."""
        return ROWS * self.iterations * self.accumulation * self.replicas

    def options(self) -> poptorch.Options:
        counts = {name: getattr(self, name) for name in ("iterations", "accumulation", "replicas")}
        opts = wrapping.options(self.backend, **counts).broadcastBuffers(False).lanes(self.lanes)
        opts.outputMode(getattr(poptorch.OutputMode, self.mode))
        opts.Precision.narrow64Bit(False)
        if self.training:
            opts.Training.accumulationAndReplicationReductionType(
                getattr(poptorch.ReductionType, self.reduction)
            )
            opts.Training.setMeanAccumulationAndReplicationReductionStrategy(
                getattr(poptorch.MeanReductionStrategy, self.strategy)
            )
        return opts


class Eager:
    """The model once for each replica, with buffers of its own and the weights of the first."""

    def __init__(
        self, make: Callable[[], nn.Module], loss: Callable[[Any], torch.Tensor], way: Way
    ) -> None:
        self.loss, self.way = loss, way
        self.models = [make() for _ in range(way.replicas)]
        for model in self.models[1:]:
            for first, other in zip(self.models[0].modules(), model.modules(), strict=True):
                other._parameters.update(first._parameters)
        self.optimizer = OPTIMIZERS[way.optimizer](self.models[0].parameters())

    def __call__(self, *batch: torch.Tensor) -> Any:
        """Do with micro-batches what a call does, and return what it returns."""
        found: list[Any] = []
        pieces = zip(*(x.split(ROWS) for x in batch), strict=True)
        for _ in range(self.way.iterations):
            self.optimizer.zero_grad()
            for _ in range(self.way.accumulation):
                found += [self._one(model, next(pieces)) for model in self.models]
            if self.way.training:
                self._update()
        if self.way.mode != "All":
            of_replicas = [found[at :: self.way.replicas] for at in range(self.way.replicas)]
            ends = self.way.mode == "Final"
            found = [each[-1] if ends else pytree.tree_map(_added, *each) for each in of_replicas]
        return pytree.tree_map(_joined, *found)

    def _one(self, model: nn.Module, piece: Batch) -> Any:
        with contextlib.nullcontext() if self.way.training else torch.no_grad():
            returned = model(*piece)
        if self.way.training:
            self.loss(returned).backward()  # type: ignore[no-untyped-call]
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, plain(returned))

    def _update(self) -> None:
        share = self.way.replicas * self.way.accumulation if self.way.reduction == "Mean" else 1
        for weight in self.models[0].parameters():
            if weight.grad is not None:
                weight.grad = weight.grad.to_dense() / share
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return self.models[0].state_dict()


class Ours:
    """The same model, wrapped."""

    def __init__(self, make: Callable[[], nn.Module], way: Way) -> None:
        self.model, opts = make(), way.options()
        if way.training:
            optimizer = OPTIMIZERS[way.optimizer](self.model.parameters())
            self.wrapper = poptorch.trainingModel(self.model, opts, optimizer)
        else:
            self.wrapper = poptorch.inferenceModel(self.model, opts)

    def __call__(self, *batch: torch.Tensor) -> Any:
        return plain(self.wrapper(*batch))

    def state(self) -> dict[str, torch.Tensor]:
        self.wrapper.copyWeightsToHost()
        return self.model.state_dict()


@contextlib.contextmanager
def wrapped(make: Callable[[], nn.Module], way: Way) -> Iterator[Ours]:
    ours = Ours(make, way)
    try:
        yield ours
    finally:
        ours.wrapper.destroy()


def plain(returned: Any) -> Any:
    """Return a dict in place of a dataclass, as trees of torch know none."""
    return vars(returned) if dataclasses.is_dataclass(returned) else returned


def _added(*values: Any) -> Any:
    return sum(values) if isinstance(values[0], torch.Tensor) else values[0]


def _joined(*values: Any) -> Any:
    if len(values) == 1 or not isinstance(values[0], torch.Tensor):
        return values[0]
    return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)
