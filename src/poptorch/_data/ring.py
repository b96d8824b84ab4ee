"""The ring of buffers between the loading process and the consumer: shared memory without a name.

The memory belongs to a file that no directory lists, so nothing can be left behind: the system
frees it when the last process that maps it ends, however it ends. It does not live in ``/dev/shm``
either, whose size containers limit.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from .element import TensorSpec

_ALIGNMENT = 64  # a cache line, and the widest vector load


def nameless_file(label: str) -> int:
    """Return the descriptor of a new empty file that lives in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=label) as file:
        return os.dup(file.fileno())


def reserve(descriptor: int, size: int) -> None:
    """Give the file its size and its memory at once: a later write could only crash.

    Raises:
        OSError: there is not that much memory.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


class Ring:
    """Views of the buffers of a ring whose file both processes map.

    Args:
        descriptor: the file, ``reserve`` d to ``size_of`` the same arguments.
        specs: the tensors of one slot.
        slots: number of slots.

    Attributes:
        slots: per slot, one tensor per spec. The memory stays mapped while any of them, or any
            view of one, is alive.
    """

    def __init__(self, descriptor: int, specs: Sequence[TensorSpec], slots: int) -> None:
        memory = mmap.mmap(descriptor, size_of(specs, slots))
        offsets, stride = _offsets(specs)
        self.slots = [
            [
                _view(memory, slot * stride + offset, spec)
                for offset, spec in zip(offsets, specs, strict=True)
            ]
            for slot in range(slots)
        ]


def size_of(specs: Sequence[TensorSpec], slots: int) -> int:
    """Return the bytes of a ring's file."""
    return max(slots * _offsets(specs)[1], mmap.PAGESIZE)


def _offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return each tensor's offset in a slot, and the size of a slot."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        size = math.prod(spec.shape) * spec.dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _view(memory: mmap.mmap, offset: int, spec: TensorSpec) -> torch.Tensor:
    count = math.prod(spec.shape)
    if count == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    flat = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset)
    return flat.view(spec.shape)


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite with values that cannot be taken for data: NaN, the largest integer, True."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
