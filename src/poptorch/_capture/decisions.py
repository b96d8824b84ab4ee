"""Python branches that buffers and fixed weights decided: what these become is not followed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Decision:
    """A tensor of the module whose values decided a branch of ``forward``."""

    path: str
    line: str | None
    value: torch.Tensor
