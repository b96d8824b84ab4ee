"""Work + strategy -> Schedule."""

from __future__ import annotations

from .._ir.placement import Placement, Strategy
from .._ir.schedule import Schedule, Work
from .listed import phased, sharded
from .pipelined import grouped, interleaved


def make(work: Work, placement: Placement) -> Schedule:
    """Return the schedule of a strategy for some work."""
    if placement.strategy is Strategy.PIPELINED:
        return interleaved(work) if placement.interleaved else grouped(work)
    if placement.strategy is Strategy.SHARDED:
        return sharded(work)
    return phased(work, placement)
