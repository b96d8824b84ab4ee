"""Pipelines: stages work on different micro-batches at the same time.

*Grouped*: in one cycle every chip does forward parts, then every chip backward parts.
*Interleaved*: a chip does a backward part as soon as it can, so that fewer activations wait at any
time, while forward and backward parts of different lengths then wait for one another.
Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

from collections import Counter

from .._ir.schedule import Do, Part, Schedule, Work
from .grid import Grid


def grouped(work: Work) -> Schedule:
    """Return the schedule in which stage s of n handles micro-batch t - s in cycle t.

    Its backward part handles micro-batch t - (2n - 2 - s): the last stage goes back at once.
    """
    stages = len(work.chips)
    halves = [[(part, _delay(part, stages)) for part in work.parts if part.do is do] for do in Do]
    cycles = work.micros + (2 * stages - 2 if work.training else stages - 1)
    grid = Grid(work)
    for cycle in range(cycles):
        for half in halves:
            start = grid.columns
            for part, delay in half:
                if 0 <= cycle - delay < work.micros:
                    for action in work.with_moves(part, cycle - delay):
                        grid.put(action, start)
    grid.put_update()
    return grid.schedule()


def _delay(part: Part, stages: int) -> int:
    return part.index if part.do is Do.FORWARD else 2 * stages - 2 - part.index


def interleaved(work: Work) -> Schedule:
    """Return the schedule in which backward goes first; stage s of n runs at most n - s ahead."""
    grid = Grid(work)
    done: Counter[Part] = Counter()  # every part handles its micro-batches in order
    left = len(work.parts) * work.micros
    while left:
        column, chosen = grid.columns, []
        for chip in work.all_chips:
            ready = [p for p in work.parts if work.chip_of(p) == chip and _ready(p, work, done)]
            if ready:
                # Backward before forward; of several stages on a chip, the furthest micro-batch.
                chosen.append(min(ready, key=lambda p: (p.do, done[p], -p.index)))
        assert chosen, "a pipeline can always go on with its oldest micro-batch"
        for part in chosen:
            for action in work.with_moves(part, done[part]):
                grid.put(action, column)
        done.update(chosen)
        left -= len(chosen)
    grid.put_update()
    return grid.schedule()


def _ready(part: Part, work: Work, done: Counter[Part]) -> bool:
    micro = done[part]
    if micro == work.micros or any(done[need] <= micro for need in work.needs.get(part, ())):
        return False
    if part.do is Do.BACKWARD or not work.training:
        return True
    return micro - done[Part(Do.BACKWARD, part.index)] < len(work.chips) - part.index
