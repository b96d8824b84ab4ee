"""Estimate roughly how long a core works on an operator, for comparisons within one graph."""

from __future__ import annotations

from torch import fx

from .._ir.operators import storage_root
from .live_bytes import value_bytes
from .operations import flops_of

FLOPS_PER_SECOND, BYTES_PER_SECOND = 100e9, 10e9
"""Operations per second of a core, and bytes per second that it reads from memory."""


def core_seconds(node: fx.Node) -> float:
    if storage_root(node) is not node:
        return 0.0
    return flops_of(node) / FLOPS_PER_SECOND + value_bytes(node) / BYTES_PER_SECOND
