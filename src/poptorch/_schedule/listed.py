"""Strategies that take one micro-batch after another: sharded and phased.

Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .._ir.placement import Placement, Strategy
from .._ir.schedule import Action, Do, Move, Schedule, Work
from ..enums import Liveness
from .grid import Grid

_LATE = (Liveness.OffChipAfterFwd, Liveness.OffChipAfterFwdNoOverlap)


def sharded(work: Work) -> Schedule:
    """Return the schedule in which one chip works at a time."""
    grid = Grid(work)
    for micro in range(work.micros):
        for part in work.parts:
            for action in work.with_moves(part, micro):
                grid.put(action, grid.columns)
    grid.put_update()
    return grid.schedule()


def phased(work: Work, placement: Placement) -> Schedule:
    """Return the schedule that goes phase by phase, forward and then back.

    Chips of one phase work side by side and wait for what they read of one another. Serial phases
    follow one another. Parallel phases alternate between two groups of chips: one group loads and
    stores while the other computes.
    """
    parallel = placement.strategy is Strategy.PARALLEL_PHASED
    grid = Grid(work)
    for micro in range(work.micros):
        for actions in _phases(work, micro, late=placement.liveness in _LATE):
            start = 0 if parallel else grid.columns
            for action in actions:
                needs = () if action.move else work.needs.get(action.part, ())
                ready = grid.after(Action(part, micro) for part in needs)
                grid.put(action, max(start, ready))
    grid.put_update()
    return grid.schedule()


def _phases(work: Work, micro: int, late: bool) -> Iterator[list[Action]]:
    """Yield the actions of each phase; late stores are a phase of their own between the passes."""
    stored = []
    for do, parts in itertools.groupby(work.parts, lambda part: part.do):
        for _, members in itertools.groupby(parts, lambda part: work.phases[part.index]):
            actions = [action for part in members for action in work.with_moves(part, micro)]
            if late and do is Do.FORWARD:
                stored += [action for action in actions if action.move is Move.STORE]
                actions = [action for action in actions if action.move is not Move.STORE]
            yield actions
        if stored:
            yield stored
            stored = []
