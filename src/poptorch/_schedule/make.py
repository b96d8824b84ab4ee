"""Make a schedule from a workload and a strategy. Source: PopTorch user guide, "Parallel
execution".
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from .._ir.block_labels import Direction, StagePass
from .._ir.schedule import Action, Schedule, Traffic, Workload, padded
from .._ir.spec import Placement, Strategy
from ..enums import Liveness

_LATE = (Liveness.OffChipAfterFwd, Liveness.OffChipAfterFwdNoOverlap)


def make(workload: Workload, placement: Placement, spread: bool = False) -> Schedule:
    """Return the schedule. ``spread`` says whether several processes share the stages."""
    grid = _Grid(workload)
    if placement.strategy is Strategy.PIPELINED and placement.interleaved:
        _interleaved(workload, grid, spread)
    elif placement.strategy is Strategy.PIPELINED:
        _grouped(workload, grid)
    elif placement.strategy is Strategy.SHARDED:
        _sharded(workload, grid)
    else:
        _phased(workload, placement, grid)
    grid.put_update()
    return Schedule(padded(grid.rows))


class _Grid:
    """An unfinished schedule. Each action is added in the earliest column that is allowed."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.rows: dict[int, list[Action | None]] = {chip: [] for chip in workload.chips}
        self._column: dict[Action, int] = {}

    @property
    def columns(self) -> int:
        return max(map(len, self.rows.values()))

    def put(self, action: Action, earliest: int = 0) -> None:
        row = self.rows[self._workload.chip_of(action.stage_pass)]
        row += [None] * (earliest - len(row))
        row.append(action)
        self._column[action] = len(row) - 1

    def put_all(self, stage_pass: StagePass, micro_batch: int, earliest: int) -> None:
        for action in self._workload.with_traffic(stage_pass, micro_batch):
            self.put(action, earliest)

    def put_update(self) -> None:
        for _, members in itertools.groupby(self._workload.updates, lambda each: each.round):
            start = self.columns
            for stage_pass in members:
                self.put_all(stage_pass, 0, start)

    def after(self, actions: Iterable[Action]) -> int:
        return max((self._column[action] + 1 for action in actions), default=0)


def _grouped(workload: Workload, grid: _Grid) -> None:
    """Alternate forward and backward passes in every cycle, unlike GPipe, which does all forward
    passes of an update first.
    """
    stages, count = len(workload.stages), workload.micro_batches
    delays = {each: each.delay(stages) for each in workload.passes}
    for cycle in range(count + max(delays.values())):
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            start = grid.columns
            for stage_pass, delay in delays.items():
                if stage_pass.direction is direction and 0 <= cycle - delay < count:
                    grid.put_all(stage_pass, cycle - delay, start)


def _interleaved(workload: Workload, grid: _Grid, spread: bool) -> None:
    """Schedule 1F1B: backward passes first, and stage s of n runs at most n - s micro-batches ahead
    (PipeDream, 2019).

    If values need time between processes, it runs one more ahead, so that the next stage need not
    wait for each value (eager 1F1B; Zhuang et al., "On Optimizing the Communication of Model
    Parallelism", 2022).
    """
    spare = 1 if spread else 0
    done: Counter[StagePass] = Counter()  # every pass handles its micro-batches in order
    left = len(workload.passes) * workload.micro_batches
    while left:
        column, chosen = grid.columns, []
        ready = [each for each in workload.passes if _is_ready(each, workload, done, spare)]
        for chip in workload.chips:
            on_chip = [each for each in ready if workload.chip_of(each) == chip]
            if on_chip:
                # Backward before forward; of several stages on a chip, the one with the furthest
                # micro-batch.
                chosen.append(min(on_chip, key=lambda p: (not p.backward, done[p], -p.stage)))
        assert chosen, "a pipeline can always go on with its oldest micro-batch"
        for stage_pass in chosen:
            grid.put_all(stage_pass, done[stage_pass], column)
        done.update(chosen)
        left -= len(chosen)


def _is_ready(
    stage_pass: StagePass, workload: Workload, done: Counter[StagePass], spare: int
) -> bool:
    micro_batch = done[stage_pass]
    needs = workload.needs.get(stage_pass, ())
    if micro_batch == workload.micro_batches or any(done[need] <= micro_batch for need in needs):
        return False
    if stage_pass.backward or not workload.training:
        return True
    ahead = micro_batch - done[StagePass(stage_pass.stage, Direction.BACKWARD)]
    following = len(workload.stages) - 1 - stage_pass.stage
    return ahead < 1 + following + (spare if following else 0)


def _sharded(workload: Workload, grid: _Grid) -> None:
    for micro_batch in range(workload.micro_batches):
        for stage_pass in workload.passes:
            for action in workload.with_traffic(stage_pass, micro_batch):
                grid.put(action, grid.columns)


def _phased(workload: Workload, placement: Placement, grid: _Grid) -> None:
    """Run phase by phase, forward and then backward. The chips of one phase work side by side.

    Serial phases follow one another. Parallel phases alternate between two groups of chips: one
    loads and stores while the other computes.
    """
    parallel = placement.strategy is Strategy.PARALLEL_PHASED
    for micro_batch in range(workload.micro_batches):
        for actions in _phases(workload, micro_batch, late=placement.liveness in _LATE):
            start = 0 if parallel else grid.columns
            for action in actions:
                needs = () if action.traffic else workload.needs.get(action.stage_pass, ())
                ready = grid.after(Action(needed, micro_batch) for needed in needs)
                grid.put(action, max(start, ready))


def _phases(workload: Workload, micro_batch: int, late: bool) -> Iterator[list[Action]]:
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
