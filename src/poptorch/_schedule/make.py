"""Workload + strategy -> Schedule."""

from __future__ import annotations

from .._ir.schedule import Schedule, Workload
from .._ir.spec import Placement, Strategy
from .listed import phased, sharded
from .pipelined import grouped, interleaved


def make(workload: Workload, placement: Placement) -> Schedule:
    """Return the schedule of a strategy for a workload."""
    if placement.strategy is Strategy.PIPELINED:
        return interleaved(workload) if placement.interleaved else grouped(workload)
    if placement.strategy is Strategy.SHARDED:
        return sharded(workload)
    return phased(workload, placement)
