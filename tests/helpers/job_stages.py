"""Models of four stages that one process runs, and several that share the stages.

Its ``main`` is one process of a job: it runs cases and writes what came of them into a folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.stage_zoo import WIDTH, Mlp, Staged
from poptorch._ir.slots import Kind

BLOCKS = 4
CALLS = 3
SAVED = "grouped"
"""The case whose model is saved."""


@dataclass(frozen=True)
class Case:
    """One way to train a model of four blocks.

    Attributes:
        strategy: how its blocks are executed.
        optimizer: from parameters.
        model: made of so many blocks.
        parts: processes that share its stages; the others of the job have other replicas.
        replicas: of each process.
        options: changes the options.
        dtype: of weights and inputs.
        infers: it is evaluated then.
    """

    strategy: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    model: Callable[[int], Staged] = Mlp
    parts: int = 0
    replicas: int = 1
    options: Callable[[poptorch.Options], Any] = lambda options: None
    dtype: torch.dtype = torch.float32
    infers: bool = True


@dataclass
class Result:
    """What came of a case in one process."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    inferred: list[torch.Tensor] = field(default_factory=list)
    refused: str = ""
    kept: int = 0
    """Bytes of weights and optimizer state on the devices of this process."""


def _phases() -> Any:
    return poptorch.ParallelPhasedExecution([[f"b{n}"] for n in range(BLOCKS)])


def _sum_of_all(options: poptorch.Options) -> None:
    options.outputMode(poptorch.OutputMode.All).deviceIterations(2)


class Normed(Staged):
    """Blocks with a batch norm, whose statistics are state that forward changes."""

    def __init__(self, blocks: int) -> None:
        super().__init__(
            blocks,
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3), nn.Tanh()),
        )


def _scaled(options: poptorch.Options) -> None:
    options.Training.setAutomaticLossScaling(True)
    options.deviceIterations(2)


class Dropping(Staged):
    """Blocks that draw, each from streams of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))


def _seeded(options: poptorch.Options) -> None:
    options.randomSeed(5)


class Exchanging(Mlp):
    """Replicas that see one another's tensors."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        pairs = {"op": "sum", "__collectiveReplicaGrouping": [1, 2, 2]}
        name = "ReplicatedAllReduceTP"
        (out,) = poptorch.custom_op(
            [x], name, "ai.graphcore", 1, [x], {"backwards": False, **pairs}
        )
        return super().run(out)


sgd, adam = poptorch.optim.SGD, poptorch.optim.AdamW
CASES = {
    "grouped": Case(poptorch.PipelinedExecution, lambda p: adam(p, lr=0.01), options=_sum_of_all),
    "interleaved, clipped": Case(
        lambda: poptorch.PipelinedExecution().useInterleavedSchedule(),
        lambda p: adam(p, lr=0.01, max_grad_norm=0.1),
    ),
    "sharded": Case(
        poptorch.ShardedExecution,
        lambda p: sgd(p, lr=0.01, momentum=0.9),
        Normed,
    ),
    "half, scaled automatically": Case(
        poptorch.PipelinedExecution,
        lambda p: sgd(p, lr=0.01, loss_scaling=1.0),
        dtype=torch.float16,
        options=_scaled,
    ),
    "dropout": Case(
        poptorch.PipelinedExecution,
        lambda p: sgd(p, lr=0.01),
        Dropping,
        options=_seeded,
        infers=False,
    ),
    "phased": Case(_phases, lambda p: adam(p, lr=0.01)),
    "two models": Case(
        poptorch.PipelinedExecution, lambda p: adam(p, lr=0.01), parts=2, replicas=2
    ),
}
REFUSED = Case(poptorch.PipelinedExecution, lambda p: adam(p, lr=0.01), Exchanging, parts=2)
"""What four processes cannot do."""


def rows(case: Case, replicas: int, call: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a call: (steps, replicas, samples of a micro-batch, ...)."""
    generator = torch.Generator().manual_seed(100 + call)
    shape = (steps, replicas, 2, 3, 4)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(case.dtype), y.to(case.dtype)


def run(
    case: Case,
    process: int,
    processes: int,
    backend: str = "auto",
    alone: bool = False,
    file: Path | None = None,
) -> Result:
    """Train and infer: as one process of several, or as one alone with all replicas.

    Args:
        case: what.
        process: which of them this is.
        processes: how many there are; for one alone, how many models the others had.
        backend: that runs it.
        alone: there is one process, with all replicas.
        file: where the trained model is saved.
    """
    parts = 1 if alone else case.parts or processes
    share, shares = process // parts, processes // parts
    total = shares * case.replicas
    local = total if alone else case.replicas
    options = poptorch.Options().replicationFactor(local).backend(backend)
    options.setExecutionStrategy(case.strategy())
    options.Training.gradientAccumulation(8)
    options.Distributed.configureProcessId(process, 1 if alone else processes)
    options.Distributed.stageProcesses(parts)
    case.options(options)
    torch.manual_seed(7 + process)  # the first process's weights are what counts
    model = case.model(BLOCKS).to(case.dtype)
    optimizer = case.optimizer(model.parameters())
    training = poptorch.trainingModel(model, options, optimizer)
    result, mine = Result(), slice(share * local, (share + 1) * local)
    for call in range(CALLS):
        if call == 1 and not alone:  # an error in every process, after which the model is usable
            x, _ = rows(case, local, process, 8 * options.device_iterations)
            try:
                training(x.flatten(0, 2), x.flatten(0, 2))
            except poptorch.Error as error:
                result.refused = str(error)
        x, y = rows(case, total, call, 8 * options.device_iterations)
        result.outputs += training(x[:, mine].flatten(0, 2), y[:, mine].flatten(0, 2))
        if not call:
            training.detachFromDevice()  # the next call attaches again
    state = training._session._attached_store().state
    slots = training.plan().program.state_slots().values()
    kept = [state.tensors[s.key] for s in slots if s.kind in (Kind.PARAM, Kind.OPTSTATE)]
    result.kept = sum(tensor.nbytes for tensor in kept if not tensor.is_meta)
    if file is not None:
        training.save(file)
    result.weights = {name: value.clone() for name, value in model.state_dict().items()}
    result.state = optimizer.state_dict()["ipu_state"]
    if not case.infers:
        training.destroy()
        return result
    inference = poptorch.inferenceModel(model.eval(), inference_options(options))
    x, y = rows(case, 1, CALLS, 8)
    result.inferred = list(inference(x.flatten(0, 2), y.flatten(0, 2)))
    inference.destroy()
    training.destroy()
    return result


def inference_options(options: poptorch.Options) -> poptorch.Options:
    """Return the options of one replica in each model, for inference."""
    own = options.clone().replicationFactor(1).deviceIterations(8)
    own.Training.gradientAccumulation(1)
    return own.outputMode(poptorch.OutputMode.All)


def main(folder: str, *names: str) -> None:
    """Run cases as one process of a job."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for name in names:
        file = Path(folder) / "saved.poptorch" if name == SAVED else None
        results[name] = vars(run(CASES[name], index, count, file=file))
    if count == 4:
        try:
            run(REFUSED, index, count)
        except poptorch.Error as error:
            results["refused"] = {"text": str(error)}
    torch.save(results, Path(folder) / f"{index}.pt")
