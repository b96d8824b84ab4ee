"""One pass of one stage: the value that a node's label, a cut graph and a chip's action share.

With n stages a micro-batch goes through ``0F 1F ... (n-1)F``, in training back through
``(n-1)B ... 1B 0B``; then come the chips' updates, ``0U0 1U0``, and the next round of them. Values
flow from earlier to later passes only; comparing two of them compares their places in this order.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass


class Direction(enum.StrEnum):
    """What a stage does, or a chip after the last micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@functools.total_ordering
@dataclass(frozen=True)
class StagePass:
    """What one stage does for one micro-batch in one direction, or one chip in the update.

    Attributes:
        stage: its index in forward order; for updates the chip.
        direction: forward, backward or update.
        round: for updates, how often chips exchanged results before; else 0.
    """

    stage: int
    direction: Direction = Direction.FORWARD
    round: int = 0

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return self.direction is Direction.BACKWARD

    @property
    def is_update(self) -> bool:
        """Whether it belongs to the optimizer's update."""
        return self.direction is Direction.UPDATE

    def delay(self, stages: int) -> int:
        """Cycles of a pipeline of so many stages until it has its first micro-batch.

        The last stage goes back in the cycle in which it went forward.
        """
        return 2 * stages - 2 - self.stage if self.backward else self.stage

    def __lt__(self, other: StagePass) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int]:
        along = -self.stage if self.backward else self.stage
        return list(Direction).index(self.direction), self.round, along

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}" + (f"{self.round}" if self.is_update else "")


def stage_passes(stages: int, training: bool) -> list[StagePass]:
    """Return the passes of one micro-batch in their order, without updates."""
    forward = [StagePass(stage) for stage in range(stages)]
    backward = [StagePass(stage, Direction.BACKWARD) for stage in reversed(range(stages))]
    return forward + (backward if training else [])
