"""What a compilation has to know about an accepted kind of optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MOMENT_TYPES = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}
CLIPPING = {"max_grad_norm": math.inf}


@dataclass(frozen=True)
class Kind:
    """One accepted kind of optimizer.

    Attributes:
        algorithm: its name in OptimSpec, and of the module of ``_update`` that has its formula.
        classes: the classes, torch's first where there is one.
        hypers: numeric attributes of groups.
        structure: attributes of the optimizer object that shape the update, with the values that
            a torch optimizer stands for.
    """

    algorithm: str
    classes: tuple[type, ...]
    hypers: tuple[str, ...]
    structure: Mapping[str, Any]
