"""Python branches that buffers and fixed weights decided: what these become is not followed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._base import log


@dataclass(eq=False)
class Decision:
    """A tensor of the module whose values decided a branch of ``forward``."""

    path: str
    line: str | None
    value: torch.Tensor
    said: bool = False

    def look(self, now: torch.Tensor) -> None:
        """Warn, once, if the values are others now."""
        if self.said or torch.equal(self.value, now):
            return
        self.said = True
        log.python.warning(
            "forward branches on the values of '%s' at %s, and they changed after the model was "
            "compiled: the program keeps to the path it took. Call destroy() on the executor, so "
            "that the next call compiles anew; torch.where and poptorch.cond decide when the "
            "program runs.",
            self.path,
            self.line,
        )
