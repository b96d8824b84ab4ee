"""Options about loops, replicas and results (PopTorch user guide, "Options")."""

from __future__ import annotations

from typing import Self

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue
from ..enums import CommGroupType, OutputMode
from .check import expect, refuse
from .container import Container


class BatchingOptions(Container):
    """Counts of the device loop, and which results come back."""

    replication_factor: int
    input_group_size: int
    input_cgt: CommGroupType
    broadcast_buffers: bool
    device_iterations: int
    output_mode: int
    output_return_period: int
    lane_memory: int

    def lanes(self, count: int) -> Self:
        """Fix how many micro-batches of a call run side by side; not a PopTorch option.

        Args:
            count: 0 (the default) lets the library choose: those of 64 rows, more where their
                intermediate values stay in the caches, within ``laneMemory``; 1 runs one
                micro-batch after another; another number is rounded down to one that divides the
                accumulation steps (in inference, the iterations) times the replicas.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        return self.set(lanes=count)

    def laneMemory(self, lane_memory: int) -> Self:
        """Limit the bytes of intermediate values of lanes; not a PopTorch option.

        Args:
            lane_memory: 0 (the default) means 1 GiB, halved until a quarter of the free memory
                holds it.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        return self.set(lane_memory=lane_memory)

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set the micro-steps (inference) or optimiser steps (training) per call; default 1.

        Values below 1 fail at compile.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of data-parallel copies in this process; default 1.

        Values below 1 fail at compile.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: CommGroupType = CommGroupType.Consecutive
    ) -> Self:
        """Let replicas of one group receive the same inputs; call after ``replicationFactor``.

        Args:
            input_group_size: replicas per group (default 1); ignored with ``NoGrouping``.
            input_group_type: ``Consecutive``, ``Orthogonal`` or ``NoGrouping``.

        Raises:
            InvalidValue: the type is ``All``, or the size is larger than, or no factor of, the
                replication factor (a ``ValueError``).
            AssertionFailure: an argument has another type (an ``AssertionError``).
        """
        expect("input_group_type", input_group_type, CommGroupType)
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        expect("input_group_size", input_group_size, int)
        problem = grouping_problem(self.replication_factor, input_group_size, input_group_type)
        if problem:
            refuse(
                InvalidValue,
                problem,
                got=f"{input_group_size} of {self.replication_factor} replicas",
                fix="call replicationFactor first, then group by one of its divisors",
            )
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Say whether all replicas share one value of each buffer; default True.

        Raises:
            AssertionFailure: not a bool (an ``AssertionError``).
        """
        return self.set(broadcast_buffers=broadcast_buffers)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose which results of a call come back.

        Args:
            output_mode: ``Final``, ``EveryN``, ``All``, ``Sum`` or ``Default`` (``All`` for
                inference, ``Final`` for training).
            output_return_period: for ``EveryN``: return one result per so many iterations. It must
                divide ``deviceIterations``, which is checked at compile. Else unused.

        Raises:
            AssertionFailure: no ``OutputMode``, or ``EveryN`` without a positive period
                (an ``AssertionError``).
        """
        expect("output_mode", output_mode, OutputMode)
        if output_mode == OutputMode.EveryN:
            check_period(output_return_period)
        elif output_return_period is not None:
            log.python.info(
                "The output return period %s is ignored: OutputMode.%s has none",
                output_return_period,
                output_mode.name,
            )
        period = 1 if output_return_period is None else output_return_period
        return self.set(output_mode=int(output_mode), output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Tell whether the output mode is still ``OutputMode.Default``."""
        return self.output_mode == OutputMode.Default


def check_period(period: object) -> None:
    """Check the period of ``EveryN``.

    Raises:
        AssertionFailure: not a positive int (an ``AssertionError``).
    """
    if not isinstance(period, int) or period < 1:
        refuse(
            AssertionFailure,
            "OutputMode.EveryN needs a positive output_return_period",
            got=repr(period),
            fix="for instance outputMode(OutputMode.EveryN, 2)",
        )


def grouping_problem(replicas: int, size: int, kind: CommGroupType) -> str | None:
    """Return what is wrong with groups of replicas that share their input, or None."""
    if kind == CommGroupType.All:
        return "The input group type cannot be All"
    if replicas < size:
        return "The input group size cannot be larger than the replication factor"
    if size < 1 or replicas % size:
        return "The input group size must be a factor of the replication factor"
    return None
