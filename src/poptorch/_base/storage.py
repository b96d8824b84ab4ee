"""What tells tensors apart: the address of their values."""

from __future__ import annotations

import torch


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's values; for one on the meta device a number of its own."""
    return id(tensor) if tensor.is_meta else tensor.data_ptr()
