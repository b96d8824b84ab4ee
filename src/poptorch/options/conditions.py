"""Compile-time conditions on single settings, which the setters leave unchecked."""

from __future__ import annotations

from typing import Any

from .._base.errors import Error
from ..enums import ConnectionType, OutputMode, SyncPattern
from .batching import grouping_problem
from .check import refuse
from .options import Options
from .strategies import PipelinedExecution, ShardedExecution


def check(options: Options) -> None:
    """Check the counts, the periods, the input groups and the process id.

    Raises:
        Error: a condition of PopTorch user guide, "Options" is broken.
    """
    for setter, value in (
        ("deviceIterations", options.device_iterations),
        ("replicationFactor", options.replication_factor),
        ("Training.gradientAccumulation", options.Training.gradient_accumulation),
        ("inputReplicaGrouping", options.input_group_size),
        ("Distributed: the number of processes", options.Distributed.numProcesses),
    ):
        if value < 1:
            refuse(Error, f"{setter} must be at least 1", got=str(value))
    if not 0 <= options.Distributed.processId < options.Distributed.numProcesses:
        refuse(
            Error,
            "The process id must be smaller than the number of processes",
            got=f"process {options.Distributed.processId} of {options.Distributed.numProcesses}",
            fix="Distributed.configureProcessId takes the id first, then the count",
        )
    _check_stored_values(options)
    problem = grouping_problem(
        options.replication_factor, options.input_group_size, options.input_cgt
    )
    if problem:
        refuse(
            Error,
            problem,
            got=f"{options.input_group_size} of {options.replication_factor} replicas",
            fix="call inputReplicaGrouping again after changing the replication factor",
        )
    check_return_period("outputMode", options.output_mode, options.output_return_period, options)
    for name, (_, _, mode, period) in options.anchored_tensors.items():
        check_return_period(f"anchorTensor({name!r})", mode, period, options)


def _check_stored_values(options: Options) -> None:
    """Check what attribute assignment and untyped dictionaries let through."""
    for name, members in (
        ("connection_type", ConnectionType),
        ("sync_pattern", SyncPattern),
    ):
        if options(name) not in list(members):
            refuse(Error, f"{name} holds no {members.__name__}", got=str(options(name)))
    for device, part in options.available_memory_proportion.items():
        if not isinstance(part, (int, float)):
            refuse(
                Error,
                "Available memory proportions must be numbers",
                got=f"IPU{device}: {part!r}",
            )


def check_return_period(setter: str, mode: Any, period: int, options: Options) -> None:
    """Check that a period of ``EveryN`` fits the device iterations.

    Raises:
        Error: it is larger than the device iterations or does not divide them.
    """
    iterations = options.device_iterations
    if mode == OutputMode.EveryN and (period < 1 or period > iterations or iterations % period):
        refuse(
            Error,
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
    refuse(
        Error,
        "You must set gradientAccumulation to 1 for inference",
        got=f"Training.gradientAccumulation({accumulation})",
        fix="options.clone().Training.gradientAccumulation(1)"
        + (advice if pipelined and not isinstance(strategy, ShardedExecution) else ""),
    )
