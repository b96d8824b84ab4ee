"""Bytes of tensors on a chip, whose integers have 32 bits at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from .._ir.slots import Slot, narrowed
from .work import tensors


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor on a chip."""
    return math.prod(shape) * narrowed(dtype).itemsize


def slot_bytes(slot: Slot) -> int:
    """Return the bytes of one replica's value of a slot."""
    return tensor_bytes(slot.replica_shape, slot.dtype)


def node_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value."""
    return sum(tensor_bytes(each.shape, each.dtype) for each in tensors(node))
