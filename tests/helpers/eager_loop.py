"""A model trained or run with any options, and the loop of eager torch that does the same."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import poptorch
from helpers import wrapping
from poptorch._ops import random_streams

ROWS = 4  # of a micro-batch
Batch = tuple[torch.Tensor, ...]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    # With a smaller eps rounding decides in which direction a weight without gradient goes.
    "adam": ("Adam", {"lr": 0.01, "eps": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}),
    "dampened": ("SGD", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
    "centred": ("RMSprop", {"lr": 0.001, "centered": True, "eps": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.001, "momentum": 0.5, "eps": 0.01}),
}


@dataclasses.dataclass(frozen=True)
class Setup:
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
    period: int = 1  # of results, where the mode has one
    group: int = 1  # of replicas that get the same inputs
    kind: poptorch.CommGroupType = poptorch.CommGroupType.Consecutive
    seed: int | None = None  # of the device

    @property
    def rows(self) -> int:
        return ROWS * self.iterations * self.accumulation * self.replicas // self.group

    @property
    def pieces(self) -> list[int]:
        """The inputs of a step that each replica gets."""
        groups, consecutive = self.replicas // self.group, self.kind.name == "Consecutive"
        return [r // self.group if consecutive else r % groups for r in range(self.replicas)]

    def optimizer_of(self, model: nn.Module, library: Any = torch.optim) -> torch.optim.Optimizer:
        kind, settings = OPTIMIZERS[self.optimizer]
        made: torch.optim.Optimizer = getattr(library, kind)(model.parameters(), **settings)
        return made

    def own_optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.optimizer_of(model)

    def options(self) -> poptorch.Options:
        counts = {name: getattr(self, name) for name in ("iterations", "accumulation", "replicas")}
        opts = wrapping.options(self.backend, **counts).broadcastBuffers(False).lanes(self.lanes)
        opts.inputReplicaGrouping(self.group, self.kind)
        period = self.period if self.mode == "EveryN" else None
        opts.outputMode(getattr(poptorch.OutputMode, self.mode), period)
        opts.Precision.narrow64Bit(False)
        if self.seed is not None:
            opts.randomSeed(self.seed)
        if self.training:
            opts.Training.accumulationAndReplicationReductionType(
                getattr(poptorch.ReductionType, self.reduction)
            )
            opts.Training.setMeanAccumulationAndReplicationReductionStrategy(
                getattr(poptorch.MeanReductionStrategy, self.strategy)
            )
        return opts


class Eager:
    """Replicas of a model: own buffers, the first's weights; ``draws`` seeds each micro-batch."""

    def __init__(
        self,
        make: Callable[..., Any],
        loss: Callable[..., Any] | type,
        setup: Setup,
        draws: Any = None,
    ) -> None:
        self.loss, self.setup, self.draws = loss, setup, draws or itertools.repeat(None)
        self.models = [make() for _ in range(setup.replicas)]
        for model in self.models[1:]:
            for first, other in zip(self.models[0].modules(), model.modules(), strict=True):
                other._parameters.update(first._parameters)
        self.optimizer = setup.optimizer_of(self.models[0]) if setup.training else None

    def __call__(self, *batch: torch.Tensor) -> Any:
        """Do with micro-batches what a call does, and return what it returns."""
        setup, found = self.setup, list[Any]()
        pieces = zip(*(x.split(ROWS) for x in batch), strict=True)
        for _ in range(setup.iterations):
            for _ in range(setup.accumulation):
                given = [next(pieces) for _ in range(setup.replicas // setup.group)]
                of_each = zip(self.models, setup.pieces, strict=True)
                found += [self._one(model, given[at]) for model, at in of_each]
            if setup.training:
                self._update()
        mode, step = setup.mode, setup.accumulation * setup.replicas
        if mode == "Default":
            mode = "Final" if setup.training else "All"
        if mode == "EveryN":
            kept = range(setup.period - 1, setup.iterations, setup.period)
            found = [each for at in kept for each in found[at * step :][:step]]
        elif mode != "All":
            of_replicas = [found[at :: setup.replicas] for at in range(setup.replicas)]
            ends = mode == "Final"
            found = [each[-1] if ends else pytree.tree_map(_added, *each) for each in of_replicas]
        return pytree.tree_map(_joined, *found)

    def _one(self, model: nn.Module, piece: Batch) -> Any:
        next(self.draws)
        with contextlib.nullcontext() if self.setup.training else torch.no_grad():
            returned = model(*piece)
        if self.setup.training:
            self.loss(returned).backward()  # type: ignore[no-untyped-call]
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, plain(returned))

    def _update(self) -> None:
        share = (
            self.setup.replicas * self.setup.accumulation if self.setup.reduction == "Mean" else 1
        )
        for weight in self.models[0].parameters():
            if weight.grad is not None:
                weight.grad = weight.grad.to_dense() / share
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return self.models[0].state_dict()


class Ours:
    def __init__(self, make: Callable[..., Any], setup: Setup) -> None:
        self.model, opts = make(), setup.options()
        if setup.training:
            optimizer = setup.own_optimizer_of(self.model)
            self.wrapper = poptorch.trainingModel(self.model, opts, optimizer)
        else:
            self.wrapper = poptorch.inferenceModel(self.model, opts)

    def __call__(self, *batch: torch.Tensor) -> Any:
        return plain(self.wrapper(*batch))

    def state(self) -> dict[str, torch.Tensor]:
        self.wrapper.copyWeightsToHost()
        return self.model.state_dict()


@contextlib.contextmanager
def wrapped(make: Callable[..., Any], setup: Setup) -> Iterator[Ours]:
    ours = Ours(make, setup)
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


def follow(state: torch.Tensor, steps: int = 1, replicas: int = 1) -> Iterator[None]:
    """Seed torch at each ``next`` as a device is for its next micro-batch, from the state given."""
    while True:
        key, state = random_streams.next_key(state)
        for step, replica in itertools.product(range(steps), range(replicas)):
            torch.manual_seed(random_streams.seed(key, step, replica))
            yield
