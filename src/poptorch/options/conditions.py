"""Conditions on options that the setters leave unchecked: at wrapping, and at compile."""

from __future__ import annotations

import enum
from typing import Any

from .._base.errors import Error
from ..enums import OutputMode
from .check import grouping_problem
from .options import Options
from .overview import settings
from .strategies import PipelinedExecution, ShardedExecution
from .table import UNSET, Setting, Value


def check(options: Options) -> None:
    """Check the counts, the periods, the input groups and the process id.

    Raises:
        Error: a condition of PopTorch user guide, "Options" is broken.
    """
    for setting in settings(options):
        for value in setting.row.values:
            _check_stored(setting, value)
    if not 0 <= options.Distributed.processId < options.Distributed.numProcesses:
        raise Error(
            "The process id must be smaller than the number of processes",
            got=f"process {options.Distributed.processId} of {options.Distributed.numProcesses}",
            fix="Distributed.configureProcessId takes the id first, then the count",
        )
    if options.Distributed.numProcesses % options.Distributed.stage_processes:
        raise Error(
            "The processes that share stages must divide the number of processes",
            got=f"Distributed.stageProcesses({options.Distributed.stage_processes}) in a job of "
            f"{options.Distributed.numProcesses}",
            fix=(
                "start a multiple of them: poprun --num-instances, torchrun --nproc-per-node",
                "options.Distributed.stageProcesses(1): each process runs all stages",
            ),
        )
    popart = options._Popart.options
    convolutions = popart.get("convolutionOptions", {})
    for name in (popart.get("partialsTypeMatMuls"), convolutions.get("partialsType")):
        if name not in (None, "float", "half"):
            raise Error("The partials type must be float or half", got=repr(name))
    for device, part in options.available_memory_proportion.items():
        if not isinstance(part, (int, float)) or not 0 <= part <= 1:
            raise Error(
                "Available memory proportions must be numbers from 0 to 1",
                got=f"IPU{device}: {part!r}",
                fix='for instance setAvailableMemoryProportion({"IPU0": 0.5})',
            )
    problem = grouping_problem(
        options.replication_factor, options.input_group_size, options.input_cgt
    )
    if problem:
        raise Error(
            problem,
            got=f"{options.input_group_size} of {options.replication_factor} replicas",
            fix="call inputReplicaGrouping again after changing the replication factor",
        )
    check_return_period("outputMode", options.output_mode, options.output_return_period, options)
    for name, (_, _, mode, period) in options.anchored_tensors.items():
        check_return_period(f"anchorTensor({name!r})", mode, period, options)


def _check_stored(setting: Setting, value: Value) -> None:
    """Check a number's lower bound, and an enum's integer, which assignment lets through."""
    stored = value.read(setting.group)
    if value.least is not None and stored < value.least:
        raise Error(f"{setting.option} must be at least {value.least}", got=str(stored))
    kind = value.kind
    if kind is None or stored is UNSET or not issubclass(kind, enum.Enum):
        return
    if stored not in list(kind):
        raise Error(f"{value.name} holds no {kind.__name__}", got=str(stored))


def check_return_period(setter: str, mode: Any, period: int, options: Options) -> None:
    """Check that a period of ``EveryN`` fits the device iterations.

    Raises:
        Error: it is larger than the device iterations or does not divide them.
    """
    iterations = options.device_iterations
    if mode == OutputMode.EveryN and (period < 1 or period > iterations or iterations % period):
        raise Error(
            f"The output return period of {setter} must divide deviceIterations",
            got=f"period {period} for {iterations} device iterations",
            fix="choose a divisor of deviceIterations",
        )


def check_inference(options: Options) -> None:
    """Check what a wrapper for inference requires when it is created.

    Raises:
        Error: gradient accumulation other than 1.
    """
    accumulation = options.Training.gradient_accumulation
    if accumulation == 1:
        return
    strategy = options._execution_strategy
    pipelined = isinstance(strategy, PipelinedExecution)
    advice = "; use Options.deviceIterations to process several batches in a pipeline"
    raise Error(
        "You must set gradientAccumulation to 1 for inference",
        got=f"Training.gradientAccumulation({accumulation})",
        fix="options.clone().Training.gradientAccumulation(1)"
        + (advice if pipelined and not isinstance(strategy, ShardedExecution) else ""),
    )
