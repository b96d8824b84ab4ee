"""Decide how a symbolic number of values is added up.

Torch adds more than 4096 values in chunks, and its code then requires that there are more of them,
so that smaller sizes would be compiled separately. However, fewer values form a single chunk, which
is added in the same order as without chunks. Code with chunks can therefore serve all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .._base import private

# The number of values for the example sizes. Short sums keep the condition that there are at most
# 4096 values: preparing the chunks takes as long as adding 500 values.
LEAST = 512


def in_chunks(
    usual: Callable[..., bool], self: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool
) -> bool:
    """Return whether a kernel adds values in chunks."""
    if reduction_type == "sum" and dtype is torch.float32:
        count = math.prod(self.call_ranges[self.reduction_depth :])
        if count.free_symbols and private.V.graph.sizevars.optimization_hint(count) >= LEAST:
            return True
    return usual(self, reduction_type, dtype, use_scalar)
