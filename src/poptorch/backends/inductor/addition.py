"""Additions with a factor, written out.

torch 2.13's generator makes ``addmm`` of ``add(x, mm(a, b), alpha=f)`` and forgets the factor,
which gives wrong numbers without a warning; of ``x + f * mm(a, b)`` it makes no such thing.
"""

from __future__ import annotations

from typing import Any

import torch


def add(first: torch.Tensor, second: torch.Tensor, *, alpha: complex = 1) -> Any:
    """Return ``first + alpha * second``; leave plain additions as they are."""
    return NotImplemented if alpha == 1 else first + second * alpha
