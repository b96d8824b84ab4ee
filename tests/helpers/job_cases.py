"""Models that one process trains with P x R replicas, and P processes with R each.

Its ``main`` is one process of a job: it runs cases and writes what came of them into a folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import poptorch
from poptorch import _job
from poptorch._ir.slots import Kind

UPDATES = 20
LOCAL = 2
"""Replicas of each process."""


class Small(nn.Module):
    """A classifier with a batch norm or dropout, if asked for."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, norm: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.between = nn.BatchNorm1d(10, dtype=dtype) if norm else nn.Dropout(drop)
        self.second = nn.Linear(10, 3, dtype=dtype)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(torch.tanh(self.between(self.first(x))))
        return out, self.loss(out.float() if out.dtype == torch.float16 else out, y)


class Wide(nn.Module):
    """Two large weights, which do not divide into equal parts, and two small ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(6, 400, dtype=dtype)
        self.second = nn.Linear(400, 3, dtype=dtype)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(torch.tanh(self.first(x)))
        return out, self.loss(out, y)


class Deep(nn.Module):
    """Enough weights that some gradients are worth adding up before the others are there."""

    def __init__(self) -> None:
        super().__init__()
        wide = [part for _ in range(3) for part in (nn.Linear(210, 210), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(6, 210), nn.Dropout(0.2), *wide)
        self.second = nn.Linear(210, 3)
        self.loss = nn.CrossEntropyLoss()
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(self.layers(x))
        return out, self.loss(out, y)


class Grouped(nn.Module):
    """A matrix of which every group of replicas has its own."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, 6, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = x @ self.weight + self.bias
        return out, self.loss(out, y)


class Exchanging(nn.Module):
    """Replicas that see one another's tensors."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(3, 3)
        self.loss = nn.CrossEntropyLoss()
        self.replicas = replicas

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def op(name: str, value: torch.Tensor, like: torch.Tensor, **attributes: Any) -> Any:
            done = poptorch.custom_op([value], name, "ai.graphcore", 1, [like], attributes)
            return done[0]

        out = self.first(x)
        pairs = {"op": "sum", "__collectiveReplicaGrouping": [2, 2, self.replicas]}
        out = out + 0.1 * op("ReplicatedAllReduceTP", out, out, backwards=False, **pairs)
        wide = out.repeat(self.replicas, 1)
        out = out + op("ReplicatedAllToAll", wide, wide)[:3]
        everyone = torch.zeros(self.replicas, *out.shape)
        everyone = op("ReplicatedAllGather", self.second(torch.tanh(out)), everyone)
        loss = self.loss(out, y) + everyone.square().mean()
        return out, poptorch.identity_loss(loss, "none")


class Blocks(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(6, 10), "first", ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(10, 3), "second", ipu_id=1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(torch.tanh(self.first(x)))
        return out, self.loss(out, y)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        optimizer: from parameters.
        model: makes the module, of the number of all replicas.
        iterations, accumulation: the loops.
        options: changes the options.
        dtype: of the inputs.
        group: replicas that share a weight; 0 for no groups.
        tolerance: relative, of weights and results.
        lanes: micro-batches side by side, 0 for the library's choice.
        apart: every process is on a machine of its own, as far as the library knows.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    model: Callable[[int], nn.Module] = lambda replicas: Small()
    iterations: int = 2
    accumulation: int = 1
    options: Callable[[poptorch.Options], Any] = lambda options: None
    dtype: torch.dtype = torch.float32
    group: int = 0
    tolerance: float = 1e-6
    lanes: int = 0
    apart: bool = False


def _sum(options: poptorch.Options) -> None:
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)


def _running(options: poptorch.Options) -> None:
    strategy = poptorch.MeanReductionStrategy.Running
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    options.outputMode(poptorch.OutputMode.Sum)


def _post_and_loss(options: poptorch.Options) -> None:
    strategy = poptorch.MeanReductionStrategy.PostAndLoss
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)


def _seeded(options: poptorch.Options) -> None:
    options.randomSeed(5)


def _anchored(options: poptorch.Options) -> None:
    options.outputMode(poptorch.OutputMode.All)
    options.anchorTensor("gradient", "Gradient___second.bias")
    options.anchorTensor("updated", "UpdatedVar___second.bias")


def _double_and_seeded(options: poptorch.Options) -> None:
    options.Precision.narrow64Bit(False)
    _seeded(options)


def _in_parts(options: poptorch.Options) -> None:
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    settings.minElementsForReplicatedTensorSharding(1000)
    options.TensorLocations.setOptimizerLocation(settings)


def _anchored_not_in_parts(options: poptorch.Options) -> None:
    _anchored(options)
    _in_parts(options)


def _wide_in_parts(options: poptorch.Options) -> None:
    options.Precision.narrow64Bit(False)
    options.anchorTensor("gradient", "Gradient___second.bias")
    _in_parts(options)


sgd, adam = poptorch.optim.SGD, poptorch.optim.Adam
CASES = {
    "sgd, sum": Case(lambda p: sgd(p, lr=0.01, momentum=0.9), options=_sum),
    "sgd, combined, chunks": Case(
        lambda p: sgd(p, lr=0.05, momentum=0.9, use_combined_accum=True), accumulation=4, lanes=4
    ),
    "adam, running, outputs added up": Case(
        lambda p: adam(p, lr=0.01), accumulation=4, lanes=4, options=_running
    ),
    "adam of torch, post and loss": Case(
        lambda p: torch.optim.Adam(p, lr=0.01), accumulation=2, options=_post_and_loss
    ),
    "adamw, clipped, anchors": Case(
        lambda p: poptorch.optim.AdamW(p, lr=0.01, max_grad_norm=0.05),
        accumulation=2,
        options=_anchored_not_in_parts,
    ),
    "lamb, every second output": Case(
        lambda p: poptorch.optim.LAMB(p, lr=0.01),
        iterations=4,
        options=lambda options: options.outputMode(poptorch.OutputMode.EveryN, 2),
    ),
    "batch norm": Case(
        lambda p: sgd(p, lr=0.05),
        lambda replicas: Small(torch.float64, norm=True),
        accumulation=2,
        options=lambda options: options.Precision.narrow64Bit(False),
        dtype=torch.float64,
        tolerance=1e-12,  # its bias is the small sum of large terms, whose rounding is of theirs
    ),
    "dropout": Case(
        lambda p: sgd(p, lr=0.05),
        lambda replicas: Small(drop=0.5),
        accumulation=4,
        options=_seeded,
        lanes=4,  # steps of one process's lanes are not those of two
    ),
    "half, scaled automatically": Case(
        lambda p: sgd(p, lr=0.05, loss_scaling=1024.0),
        lambda replicas: Small(torch.float16),
        options=lambda options: options.Training.setAutomaticLossScaling(True),
        dtype=torch.float16,
        tolerance=2e-3,  # of half numbers, whose sums depend on the order
    ),
    "adam in parts": Case(
        lambda p: adam(p, lr=0.01), lambda replicas: Wide(), accumulation=2, options=_in_parts
    ),
    "adamw in parts, clipped, float64": Case(
        lambda p: poptorch.optim.AdamW(p, lr=0.01, max_grad_norm=0.05),
        lambda replicas: Wide(torch.float64),
        accumulation=4,
        lanes=4,
        options=_wide_in_parts,
        dtype=torch.float64,
        tolerance=1e-12,
    ),
    "lamb in parts": Case(
        lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.1),
        lambda replicas: Wide(),
        accumulation=2,
        options=_in_parts,
    ),
    "exchanges over processes": Case(lambda p: adam(p, lr=0.01), Exchanging, accumulation=2),
    "groups over processes": Case(
        lambda p: adam(p, lr=0.01), lambda replicas: Grouped(replicas // 2), accumulation=2, group=2
    ),
    "machines": Case(
        lambda p: sgd(p, lr=0.05, momentum=0.9),
        lambda replicas: Deep(),
        options=_double_and_seeded,
        dtype=torch.float64,
        tolerance=1e-12,
        apart=True,
    ),
    "stages": Case(
        lambda p: adam(p, lr=0.01),
        lambda replicas: Blocks(),
        accumulation=4,
        options=lambda options: options.backend("staged"),
    ),
}


@dataclass
class Result:
    """What came of a case in one process."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    program: str = ""
    moments: int = 0
    """Bytes of the optimizer's state in this process."""


def rows(case: Case, replicas: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of one call: (steps, replicas, samples of a micro-batch, ...)."""
    generator = torch.Generator().manual_seed(100 + call)
    shape = (case.iterations * case.accumulation, replicas, 3)
    x = torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, shape, generator=generator)
    return x.to(case.dtype), y


def run(
    case: Case,
    process: int,
    processes: int,
    seed: int = 7,
    alone: bool = False,
    calls: int | None = None,
) -> Result:
    """Train: as one of several processes with LOCAL replicas, or as one alone with all of them.

    Args:
        case: what.
        process: which of them this is.
        processes: how many share the replicas.
        seed: of the first weights.
        alone: one process has all replicas.
        calls: how many; None for as many as make UPDATES.
    """
    total = processes * LOCAL
    local = total if alone else LOCAL
    options = poptorch.Options().deviceIterations(case.iterations).replicationFactor(local)
    options.backend("reference").lanes(case.lanes)
    options.Training.gradientAccumulation(case.accumulation)
    options.Distributed.configureProcessId(process, 1 if alone else processes)
    case.options(options)
    torch.manual_seed(seed)
    model = case.model(total)
    optimizer = case.optimizer(model.parameters())
    training = poptorch.trainingModel(model, options, optimizer)
    if case.group:
        retrieval = poptorch.VariableRetrievalMode.OnePerGroup
        training.weight.replicaGrouping(poptorch.CommGroupType.Orthogonal, case.group, retrieval)
    result = Result()
    if case.apart:
        patch.object(_job, "own_address", lambda: f"machine {process}").start()
    for call in range(UPDATES // case.iterations if calls is None else calls):
        x, y = rows(case, total, call)
        mine = slice(process * local, (process + 1) * local)
        x, y = x[:, mine].flatten(0, 2), y[:, mine].flatten(0, 2)
        out, loss = training(x, y)
        result.outputs.append(out.clone())
        result.losses.append(loss.clone())
    patch.stopall()
    result.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    names = training.options.anchored_tensors
    result.anchors = {name: training.getAnchoredTensor(name).clone() for name in names}
    session = training._session
    program, device = session.now.compiled.plan.program, session.store
    result.program = str(program)
    slots = program.state_slots().values()
    kept = [device.state.tensors[s.key] for s in slots if s.kind is Kind.OPTSTATE]
    result.moments = sum(tensor.nbytes for tensor in kept)
    result.state = optimizer.state_dict().get("ipu_state") or {}
    training.destroy()
    return result


def main(folder: str, *names: str) -> None:
    """Run cases, all if none is named, as one process of a job."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Other first weights in each process: those of process 0 are what counts.
    results = {name: vars(run(CASES[name], index, count, 7 + index)) for name in names or CASES}
    torch.save(results, Path(folder) / f"{index}.pt")
