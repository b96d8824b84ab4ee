"""Models that one process trains alone, and several processes that share replicas or stages.

Its ``main`` is one process of a job: it runs cases and writes what came of them into a folder.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import poptorch
from helpers import wrapping
from helpers.closeness import relative
from helpers.wrapping import Having
from poptorch import MeanReductionStrategy, _job, _place
from poptorch._ir.slots import Kind

CALLS = 3
LOCAL = 2  # replicas of each process
SAVED = "stages, half, scaled automatically"
"""The case whose model is saved; before that its processes are given different batches."""
measured, SLOW = _job.group.ProcessGroup.timings, (0.0, 1e6, 1e-3)
sgd, adam, adamw = poptorch.optim.SGD, poptorch.optim.Adam, poptorch.optim.AdamW


class Net(nn.Module):
    """A classifier with something between its first and its last layer."""

    def __init__(self, wide: int = 10, *between: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, wide), *between, nn.Tanh())
        self.second = nn.Linear(wide, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(self.layers(x))
        return out, self.loss(out.float() if out.dtype == torch.float16 else out, y)


def blocks(layer: Callable[[], nn.Module], chips: int) -> Net:
    model = Net(6, nn.Linear(6, 6), layer(), nn.Linear(6, 6), layer())
    layers = model.layers
    for number, first in enumerate((layers[0], layers[1], layers[3], model.second)):
        poptorch.BeginBlock(first, f"b{number}", ipu_id=min(number, chips - 1))
    return model


def deep() -> Net:
    """Enough weights that some gradients are worth adding up before the others are there."""
    wide = [part for _ in range(3) for part in (nn.Linear(210, 210), nn.Tanh())]
    return Net(210, nn.Dropout(0.2), *wide)


def grouped(groups: int) -> Having:
    """A matrix that differs between groups of replicas."""

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = x @ model.weight + model.bias
        return out, nn.functional.cross_entropy(out, y)

    weight, bias = nn.Parameter(torch.randn(groups, 6, 3)), nn.Parameter(torch.zeros(3))
    return Having(forward, weight=weight, bias=bias)


class Exchanging(nn.Module):
    """Replicas that see one another's tensors."""

    def __init__(self, replicas: int, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.first = nn.Linear(6, 3)
        self.second = poptorch.BeginBlock(nn.Linear(3, 3), "second", ipu_id=1)
        self.loss = nn.CrossEntropyLoss()
        self.replicas = replicas

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def op(name: str, value: torch.Tensor, like: torch.Tensor, **attributes: Any) -> Any:
            return poptorch.custom_op([value], name, "ai.graphcore", 1, [like], attributes)[0]

        out = self.first(x)
        pairs = {"op": "sum", "__collectiveReplicaGrouping": [self.groups, 2, self.replicas]}
        out = out + 0.1 * op("ReplicatedAllReduceTP", out, out, backwards=False, **pairs)
        wide = out.repeat(self.replicas, 1)
        out = out + op("ReplicatedAllToAll", wide, wide)[:3]
        everyone = torch.zeros(self.replicas, *out.shape)
        everyone = op("ReplicatedAllGather", self.second(torch.tanh(out)), everyone)
        return out, poptorch.identity_loss(self.loss(out, y) + everyone.square().mean(), "none")


def spectral(width: int = 400) -> Having:
    """A classifier with complex weights."""

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = (torch.tanh(x.to(model.first.dtype) @ model.first) @ model.second).imag
        return out, nn.functional.cross_entropy(out, y)

    shapes = {"first": (6, width), "second": (width, 3)}
    weights = {k: 0.1 * torch.randn(s, dtype=torch.complex64) for k, s in shapes.items()}
    return Having(forward, **{name: nn.Parameter(weight) for name, weight in weights.items()})


@dataclass(frozen=True)
class Case:
    """One way to train."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    model: Callable[[int], nn.Module] = lambda replicas: Net()  # of the number of all replicas
    iterations: int = 2
    accumulation: int = 1
    options: Callable[[poptorch.Options], Any] = lambda options: None  # changes them
    dtype: torch.dtype = torch.float32
    group: int = 0  # replicas that share a weight; 0 for no groups
    tolerance: float = relative(8)  # of weights and results
    lanes: int = 0  # 0 for the library's choice
    separate_machines: bool = (
        False  # every process is on a machine of its own, as far as the library knows
    )
    hidden: bool = False  # processes see one another only over sockets, as containers do
    parts: int = 1  # processes that share the stages; the others have other replicas
    replicas: int = LOCAL  # of each process
    infers: bool = False  # it is evaluated then
    backends: tuple[str, str] = ("reference", "reference")  # of several processes, of the one


def _clipped_nadam(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.NAdam(params, lr=0.01)
    optimizer.max_grad_norm = 0.05
    return optimizer


def _in_parts(options: poptorch.Options, least: int = 1000) -> None:
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    settings.minElementsForReplicatedTensorSharding(least)
    options.TensorLocations.setOptimizerLocation(settings)


def _in_parts_and_anchored(options: poptorch.Options) -> None:
    _in_parts(options)
    options.outputMode(poptorch.OutputMode.All)
    options.anchorTensor("gradient", "Gradient___second.bias")


def _anchored_not_in_parts(options: poptorch.Options) -> None:
    _in_parts_and_anchored(options)
    options.anchorTensor("updated", "UpdatedVar___second.bias")


def _in_parts_and_every_second(options: poptorch.Options) -> None:
    _in_parts(options, 400)
    options.outputMode(poptorch.OutputMode.EveryN, 2)


def _running(options: poptorch.Options) -> None:
    strategy = MeanReductionStrategy.Running
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    options.outputMode(poptorch.OutputMode.Sum)


def _staged(
    strategy: Any = poptorch.PipelinedExecution,
    optimizer: Any = None,
    layer: Callable[[], nn.Module] = nn.Tanh,
    chips: int = 4,
    **more: Any,
) -> Case:
    optimizer = optimizer or (lambda p: adamw(p, lr=0.01))

    def options(made: poptorch.Options) -> None:
        made.setExecutionStrategy(strategy()).outputMode(poptorch.OutputMode.All)
        made.Training.setAutomaticLossScaling(more.get("dtype") is torch.float16)

    more = {"parts": 2, "replicas": 1, "accumulation": 8, "backends": ("auto", "reference"), **more}
    return Case(optimizer, lambda _: blocks(layer, chips), options=options, **more)


CASES = {
    "sgd, sum": Case(
        lambda p: sgd(p, lr=0.01, momentum=0.9),
        options=lambda options: options.Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType.Sum
        ),
        hidden=True,
    ),
    "sgd, combined, chunks": Case(
        lambda p: sgd(p, lr=0.05, momentum=0.9, use_combined_accum=True), accumulation=4, lanes=4
    ),
    "adam, running, outputs added up": Case(
        lambda p: adam(p, lr=0.01), accumulation=4, lanes=4, options=_running
    ),
    "adam of torch, post and loss": Case(
        lambda p: torch.optim.Adam(p, lr=0.01),
        accumulation=2,
        options=lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(
            MeanReductionStrategy.PostAndLoss
        ),
    ),
    "adamw, clipped, anchors": Case(
        lambda p: adamw(p, lr=0.01, max_grad_norm=0.05),
        accumulation=2,
        options=_anchored_not_in_parts,
    ),
    "batch norm": Case(
        lambda p: sgd(p, lr=0.05),
        lambda replicas: Net(10, nn.BatchNorm1d(10)),
        accumulation=2,
        dtype=torch.float64,
        # Its bias is the small sum of large terms, whose rounding is of theirs.
        tolerance=relative(50, 10, torch.float64),
    ),
    "half, scaled automatically": Case(
        lambda p: sgd(p, lr=0.05, loss_scaling=1024.0),
        options=lambda options: options.Training.setAutomaticLossScaling(True),
        dtype=torch.float16,
        tolerance=relative(2, dtype=torch.float16),  # whose sums depend on the order
    ),
    "adam in parts": Case(
        lambda p: adam(p, lr=0.01), lambda replicas: Net(400), accumulation=2, options=_in_parts
    ),
    "adamw in parts, clipped, float64": Case(
        lambda p: adamw(p, lr=0.01, max_grad_norm=0.05),
        lambda replicas: Net(400),
        accumulation=4,
        lanes=4,
        options=_in_parts_and_anchored,
        dtype=torch.float64,
        tolerance=relative(50, 10, torch.float64),
    ),
    "nadam, traced, clipped": Case(_clipped_nadam, accumulation=2),
    "nadam in parts, traced": Case(
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda replicas: Net(400),
        accumulation=2,
        options=_in_parts,
        tolerance=relative(16),
    ),
    "adafactor not in parts, traced": Case(
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda replicas: Net(400),
        options=_in_parts,
        tolerance=relative(32),
    ),
    "nadam not in parts, traced, clipped": Case(
        _clipped_nadam, lambda replicas: Net(400), options=_in_parts, tolerance=relative(16)
    ),
    "lamb in parts": Case(
        lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.1),
        lambda replicas: Net(400),
        accumulation=2,
        options=_in_parts_and_every_second,
    ),
    "complex, adamw in parts, clipped": Case(
        lambda p: adamw(p, lr=0.01, max_grad_norm=0.05),
        lambda replicas: spectral(),
        accumulation=2,
        lanes=2,
        options=_in_parts,
    ),
    "exchanges over processes": Case(
        lambda p: adam(p, lr=0.01), Exchanging, accumulation=4, separate_machines=True
    ),
    "groups over processes": Case(
        lambda p: adam(p, lr=0.01), lambda replicas: grouped(replicas // 2), accumulation=2, group=2
    ),
    "machines": Case(
        lambda p: sgd(p, lr=0.05, momentum=0.9),
        lambda replicas: deep(),
        dtype=torch.float64,
        tolerance=relative(50, 10, torch.float64),
        separate_machines=True,
    ),
    "all stages in each": _staged(parts=1, replicas=LOCAL, backends=("staged", "reference")),
    "stages, grouped": _staged(chips=2, accumulation=4, infers=True),
    "stages over three": _staged(
        lambda: poptorch.PipelinedExecution().useInterleavedSchedule(), parts=3, infers=True
    ),
    "stages, interleaved, clipped": _staged(
        lambda: poptorch.PipelinedExecution().useInterleavedSchedule(),
        lambda p: adamw(p, lr=0.01, max_grad_norm=0.1),
    ),
    "stages, sharded, batch norm": _staged(
        poptorch.ShardedExecution,
        lambda p: sgd(p, lr=0.01, momentum=0.9),
        lambda: nn.BatchNorm1d(6),
        dtype=torch.float64,
        tolerance=relative(50, 10, torch.float64),
    ),
    SAVED: _staged(
        optimizer=lambda p: adamw(p, lr=0.01, loss_scaling=1.0),
        dtype=torch.float16,
        tolerance=relative(2, dtype=torch.float16),
        infers=True,
    ),
    "stages, dropout": _staged(
        layer=lambda: nn.Dropout(0.5),
        backends=("auto", "staged"),  # fused, later stages draw other numbers
    ),
    "stages, phased": _staged(
        lambda: poptorch.ParallelPhasedExecution([[f"b{number}"] for number in range(4)]),
        infers=True,
    ),
    "stages of two models": _staged(replicas=2),
}
REFUSED = Case(  # what four processes cannot do
    lambda p: adam(p, lr=0.01),
    lambda replicas: Exchanging(replicas, 1),
    parts=2,
    replicas=1,
    accumulation=4,
    options=CASES[SAVED].options,
    backends=("auto", ""),
)


@dataclass
class Result:
    """The result of a case in one process."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    inferred: list[torch.Tensor] = field(default_factory=list)
    program: str = ""
    refused: str = ""
    kept: dict[str, int] = field(default_factory=dict)  # bytes in this process by kind of slot
    exchanged: torch.Tensor | None = None  # what the script itself has added up


def rows(case: Case, replicas: int, call: int) -> list[torch.Tensor]:
    """Return the samples of one call: (steps, replicas, samples of a micro-batch, ...)."""
    generator = torch.Generator().manual_seed(100 + call)
    shape = (case.iterations * case.accumulation, replicas, 3)
    x = torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
    return [x.to(case.dtype), torch.randint(0, 3, shape, generator=generator)]


def wrapped(case: Case, process: int, processes: int, alone: bool) -> poptorch.PoplarExecutor:
    """Return the model of one process of several, or of one alone with what all have."""
    shares = processes // case.parts
    counts = {"iterations": case.iterations, "accumulation": case.accumulation}
    counts["replicas"] = case.replicas * (shares if alone else 1)
    options = wrapping.options(case.backends[alone], **counts).randomSeed(5).lanes(case.lanes)
    options.Precision.narrow64Bit(case.dtype is not torch.float64)
    options.Distributed.configureProcessId(process, 1 if alone else processes)
    options.Distributed.stageProcesses(1 if alone else case.parts)
    case.options(options)
    torch.manual_seed(7 + process)  # the weights of process 0 are what counts
    model = case.model(shares * case.replicas)
    model = model if any(p.is_complex() for p in model.parameters()) else model.to(case.dtype)
    training = poptorch.trainingModel(model, options, case.optimizer(model.parameters()))
    if case.group:
        retrieval = poptorch.VariableRetrievalMode.OnePerGroup
        training.weight.replicaGrouping(poptorch.CommGroupType.Orthogonal, case.group, retrieval)
    return training


def run(
    case: Case, process: int, processes: int, alone: bool = False, file: Path | None = None
) -> Result:
    """Train as one of several or alone; refuse batches unlike process 0's, then save in a file."""
    training, result = wrapped(case, process, processes, alone), Result()
    share, shares = (0, 1) if alone else (process // case.parts, processes // case.parts)
    local = training.options.replication_factor
    if case.hidden and process:
        patch.object(_job.shared_memory.os, "readlink", side_effect=FileNotFoundError).start()
    if case.separate_machines:
        patch.object(_job, "own_address", lambda: f"machine {process}").start()
        patch.dict(_place.early.__globals__, LEAST=float("-inf")).start()
        patch.object(_job.group.ProcessGroup, "timings", lambda own: measured(own) and SLOW).start()
    for call in range(CALLS):
        mine = slice(share * local, (share + 1) * local)
        x, y = (each[:, mine].flatten(0, 2) for each in rows(case, shares * local, call))
        if call == 1 and file is not None:
            try:
                training(x + process, y)
            except poptorch.Error as error:
                result.refused = str(error)
        exchanges = call == 1 and processes > 1 and not alone
        own = torch.full((sum(p.numel() for p in training.parameters()),), process + 1.0)
        work = dist.all_reduce(own, async_op=True) if exchanges and not process else None
        out, loss = training(x, y)
        if exchanges:  # as many numbers as the program; one process begins before its call
            (work or dist.all_reduce(own, async_op=True)).wait()
            result.exchanged = own
        result.outputs.append(out.clone())
        result.losses.append(loss.clone())
        if not call:
            training.detachFromDevice()  # the next call attaches again
    patch.stopall()
    names = training.options.anchored_tensors
    result.anchors = {name: training.getAnchoredTensor(name).clone() for name in names}
    session = training._session
    tensors, program = session.weights.attached.state.tensors, session.now.compiled.plan.program
    result.program = str(program)
    for kind in (Kind.PARAM, Kind.OPTSTATE):
        kept = [tensors[slot.key] for slot in program.state_slots().values() if slot.kind is kind]
        result.kept[kind.name] = sum(each.nbytes for each in kept if not each.is_meta)
    result.kept["regions"] = regions()
    if file is not None:
        training.save(file)
    result.weights = {k: v.detach().clone() for k, v in training.state_dict().items()}
    result.state = training._optimizer.state_dict().get("ipu_state") or {}
    if case.infers:
        result.inferred = infer(case, training)
    training.destroy()
    return result


def regions() -> int:
    """Return how many pieces of memory this process has in common with others, its own included."""
    gc.collect()  # executors of cases before
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in mapped if "memfd:poptorch-" in line})


def infer(case: Case, training: poptorch.PoplarExecutor) -> list[torch.Tensor]:
    """Evaluate a trained model by one replica of each process."""
    x, y = (each.flatten(0, 2) for each in rows(case, 1, CALLS))
    options = training.options.clone().replicationFactor(1).deviceIterations(len(y) // 3)
    options.Training.gradientAccumulation(1)
    inference = poptorch.inferenceModel(training.model.eval(), options)
    results = [each.clone() for each in inference(x, y)]
    inference.destroy()
    return results


def main(folder: str, *names: str) -> None:
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for name in names:
        file = Path(folder) / "saved.poptorch" if name == SAVED else None
        results[name] = vars(run(CASES[name], index, count, file=file))
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    results["limit"] = {"seconds": limit.total_seconds()}
    if count == 4:
        try:
            run(REFUSED, index, count)
        except poptorch.Error as error:
            results["refused"] = {"text": str(error)}
    torch.save(results, Path(folder) / f"{index}.pt")
