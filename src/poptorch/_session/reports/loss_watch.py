"""Warn of the first loss of a model that is not a finite number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..._base import log
from ...enums import OutputMode
from ..programs import Specialization


class LossWatch:
    """Checks the losses of one wrapped model, and warns once."""

    def __init__(self) -> None:
        self._has_warned = False

    def check(self, program: Specialization, results: Sequence[torch.Tensor], updates: int) -> None:
        """Check the losses of a call.

        Args:
            program: what has run.
            results: its results.
            updates: the number of updates that have been made, including those of this call.
        """
        if self._has_warned or program.loss_at is None:
            return
        losses = results[program.loss_at]
        # The check of labels has called tolist(), too. If other code has run since the last call, a
        # method that nothing else calls takes 2 us longer.
        value = losses.tolist()
        if math.isfinite(value if isinstance(value, float) else losses.sum().item()):
            return
        bad = losses.reshape(-1).isfinite().logical_not().nonzero()
        if not len(bad):  # all values are finite, but their sum is not
            return
        self._has_warned, first, loops = True, int(bad[0]), program.spec.loops
        of_update = loops.accumulation * loops.replicas
        if program.compiled.plan.program.emit.mode is OutputMode.All:
            updates += 1 + first // of_update - loops.iterations
        log.python.warning(
            f"The loss is {float(losses.reshape(-1)[first])} for the first time, in update "
            f"{updates} of this run. A lower learning rate, or max_grad_norm of the "
            "optimizer, often helps. To stop at the operator that causes it, call "
            "options.Precision.enableFloatingPointExceptions(True); torch's detect_anomaly "
            "has no effect on a compiled program"
        )
