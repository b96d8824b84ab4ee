"""Pipelines: stages work on different micro-batches at the same time.

*Grouped*: in one cycle every chip does forward passes, then every chip backward passes.
*Interleaved*: a chip does a backward pass as soon as it can, so that fewer activations wait at any
time, while forward and backward passes of different lengths then wait for one another. This is the
schedule known as 1F1B (Narayanan et al., "PipeDream", 2019). Neither is GPipe's, which
does all forward passes of an update before the first backward one.
Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

from collections import Counter

from .._ir.blocks import Direction, StagePass
from .._ir.schedule import Schedule, Workload
from .grid import Grid


def grouped(workload: Workload) -> Schedule:
    """Return the schedule in which every stage handles micro-batch t - its delay in cycle t."""
    stages, count = len(workload.stages), workload.micro_batches
    delays = {each: each.delay(stages) for each in workload.passes}
    grid = Grid(workload)
    for cycle in range(count + max(delays.values())):
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            start = grid.columns
            for stage_pass, delay in delays.items():
                if stage_pass.direction is direction and 0 <= cycle - delay < count:
                    for action in workload.with_traffic(stage_pass, cycle - delay):
                        grid.put(action, start)
    grid.put_update()
    return grid.schedule()


def interleaved(workload: Workload) -> Schedule:
    """Return the schedule in which backward goes first; stage s of n runs at most n - s ahead."""
    grid = Grid(workload)
    done: Counter[StagePass] = Counter()  # every pass handles its micro-batches in order
    left = len(workload.passes) * workload.micro_batches
    while left:
        column, chosen = grid.columns, []
        ready = [each for each in workload.passes if _ready(each, workload, done)]
        for chip in workload.chips:
            here = [each for each in ready if workload.chip_of(each) == chip]
            if here:
                # Backward before forward; of several stages on a chip, the furthest micro-batch.
                chosen.append(min(here, key=lambda p: (not p.backward, done[p], -p.stage)))
        assert chosen, "a pipeline can always go on with its oldest micro-batch"
        for stage_pass in chosen:
            for action in workload.with_traffic(stage_pass, done[stage_pass]):
                grid.put(action, column)
        done.update(chosen)
        left -= len(chosen)
    grid.put_update()
    return grid.schedule()


def _ready(stage_pass: StagePass, workload: Workload, done: Counter[StagePass]) -> bool:
    micro_batch = done[stage_pass]
    needs = workload.needs.get(stage_pass, ())
    if micro_batch == workload.micro_batches or any(done[need] <= micro_batch for need in needs):
        return False
    if stage_pass.backward or not workload.training:
        return True
    ahead = micro_batch - done[StagePass(stage_pass.stage, Direction.BACKWARD)]
    return ahead < len(workload.stages) - stage_pass.stage
