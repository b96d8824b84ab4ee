"""Strategies that take one micro-batch after another: sharded and phased.

Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .._ir.schedule import Action, Schedule, Traffic, Workload
from .._ir.spec import Placement, Strategy
from ..enums import Liveness
from .grid import Grid

_LATE = (Liveness.OffChipAfterFwd, Liveness.OffChipAfterFwdNoOverlap)


def sharded(workload: Workload) -> Schedule:
    """Return the schedule in which one chip works at a time."""
    grid = Grid(workload)
    for micro_batch in range(workload.micro_batches):
        for stage_pass in workload.passes:
            for action in workload.with_traffic(stage_pass, micro_batch):
                grid.put(action, grid.columns)
    grid.put_update()
    return grid.schedule()


def phased(workload: Workload, placement: Placement) -> Schedule:
    """Return the schedule that goes phase by phase, forward and then back.

    Chips of one phase work side by side and wait for what they read of one another. Serial phases
    follow one another. Parallel phases alternate between two groups of chips: one group loads and
    stores while the other computes.
    """
    parallel = placement.strategy is Strategy.PARALLEL_PHASED
    grid = Grid(workload)
    for micro_batch in range(workload.micro_batches):
        for actions in _phases(workload, micro_batch, late=placement.liveness in _LATE):
            start = 0 if parallel else grid.columns
            for action in actions:
                needs = () if action.traffic else workload.needs.get(action.stage_pass, ())
                ready = grid.after(Action(needed, micro_batch) for needed in needs)
                grid.put(action, max(start, ready))
    grid.put_update()
    return grid.schedule()


def _phases(workload: Workload, micro_batch: int, late: bool) -> Iterator[list[Action]]:
    """Yield the actions of each phase; late stores are a phase of their own between the passes."""
    stored, stages = [], workload.stages
    for backward, passes in itertools.groupby(workload.passes, lambda each: each.backward):
        for _, members in itertools.groupby(passes, lambda each: stages[each.stage].phase):
            actions = [a for each in members for a in workload.with_traffic(each, micro_batch)]
            if late and not backward:
                stored += [action for action in actions if action.traffic is Traffic.STORE]
                actions = [action for action in actions if action.traffic is not Traffic.STORE]
            yield actions
        if stored:
            yield stored
            stored = []
