"""What a user would see in eager code at once, and here is told in one line, once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .._base import log
from ..enums import OutputMode
from .programs import Variant


class LossWatch:
    """Names the update in which the loss is no number for the first time."""

    def __init__(self) -> None:
        self._told = False

    def look(self, now: Variant, results: Sequence[torch.Tensor], updates: int) -> None:
        """Look at the results of a call, after which there were so many updates."""
        if self._told or now.loss_at is None:
            return
        losses = results[now.loss_at]
        if math.isfinite(losses if losses.numel() == 1 else losses.sum()):  # 2 us
            return
        bad = losses.reshape(-1).isfinite().logical_not().nonzero()
        if not len(bad):  # only the sum of them is too large
            return
        self._told, first, loops = True, int(bad[0]), now.spec.loops
        of_update = loops.accumulation * loops.replicas
        if now.compiled.plan.program.emit.mode is OutputMode.All:
            updates += 1 + first // of_update - loops.iterations
        log.python.warning(
            "The loss is %s for the first time, in update %d of this run. Often a lower learning "
            "rate or max_grad_norm of the optimizer helps. options.Precision."
            "enableFloatingPointExceptions(True) stops at the operator that makes it; torch's "
            "detect_anomaly sees nothing of a program",
            float(losses.reshape(-1)[first]),
            updates,
        )
