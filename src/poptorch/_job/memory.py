"""Memory that the processes of a job on one machine have in common: sums without a network.

Each process adds one part up, out of all processes' memory and into all of it: of each byte of a
gradient a process reads one and writes one, and no copy is made. A region has no name in a file
system; it ends with the processes that have it open, whatever ends them.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
import weakref
from collections.abc import Sequence

import torch

_PIECE = 1 << 16  # elements that are added up at once: they stay in a core's cache
_LINE = 64  # elements: parts do not meet within a line of the caches

# What a process may name: a file of its own that has no name in a file system.
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_CALLED = re.compile(r"poptorch-[0-9a-f]{32}")

Regions = list[torch.Tensor]  # of one tensor: that of each process, in their order


class CommonMemory:
    """The tensors of this process that others can find, and where theirs are."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by address
        self._regions: dict[int, Regions] = {}  # by address; empty: not in all processes' reach

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in a region of its own."""
        name = f"poptorch-{uuid.uuid4().hex}"  # what _CALLED describes
        descriptor = os.memfd_create(name)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, count * dtype.itemsize)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        tensor = torch.from_file(path, shared=True, size=count, dtype=dtype)
        self._names[tensor.data_ptr()] = f"{path} {name}"
        weakref.finalize(tensor, self._forget, tensor.data_ptr(), descriptor)
        return tensor

    def _forget(self, address: int, descriptor: int) -> None:
        del self._names[address]
        self._regions.pop(address, None)
        os.close(descriptor)

    def names(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Return where others find these tensors; nothing where they do not."""
        names = [self._names.get(each.data_ptr(), "") for each in tensors]
        return names if all(names) else []

    def regions(self, tensors: Sequence[torch.Tensor]) -> list[Regions] | None:
        """Return the regions of tensors; None if nobody has looked for them."""
        found = [self._regions.get(each.data_ptr()) for each in tensors]
        return None if None in found else found  # type: ignore[return-value]

    def find(
        self, tensors: Sequence[torch.Tensor], names: Sequence[Sequence[str]]
    ) -> list[Regions]:
        """Return the regions that processes have so named; nothing if some are out of reach.

        This process's are opened again: its tensors go when the program's state lets them go.
        """
        with contextlib.suppress(OSError):
            return [
                [_opened(name, tensor) for name in of_one]
                for tensor, *of_one in zip(tensors, *names, strict=True)
            ]
        return []

    def keep(self, tensors: Sequence[torch.Tensor], regions: Sequence[Regions]) -> None:
        for tensor, of_one in zip(tensors, regions or [[]] * len(tensors), strict=True):
            self._regions[tensor.data_ptr()] = of_one


def _opened(name: str, like: torch.Tensor) -> torch.Tensor:
    """Map the region that another process has named: only what ``zeros`` makes, nothing else.

    Whoever writes to the store chooses the name. A name that could mean a file, a region of another
    size or one of another user is refused, before anything is mapped or changed.
    """
    path, _, called = name.partition(" ")
    if not (_PATH.fullmatch(path) and _CALLED.fullmatch(called)):
        raise FileNotFoundError(f"{name!r} names no region of a job")
    _look(path, called)  # before it is opened: to open a device may do something
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        opened, status = f"/proc/self/fd/{descriptor}", os.fstat(descriptor)
        _look(opened, called)
        if status.st_nlink or status.st_uid != os.getuid() or status.st_size != like.nbytes:
            raise FileNotFoundError(f"{name!r} is not a region of this user and of this size")
        return torch.from_file(opened, shared=True, size=like.numel(), dtype=like.dtype)
    finally:
        os.close(descriptor)


def _look(path: str, called: str) -> None:
    """Refuse another file: processes of other containers may have the same numbers."""
    if os.readlink(path) != f"/memfd:{called} (deleted)":
        raise FileNotFoundError(f"{path} is not the region {called}")


def add_up(regions: Regions, index: int) -> None:
    """Write the sums of a process's part of a tensor into the regions of all."""
    size = regions[0].numel()
    of_each = -(-size // (len(regions) * _LINE)) * _LINE
    end = min(size, (index + 1) * of_each)
    for at in range(index * of_each, end, _PIECE):
        pieces = [region[at : min(end, at + _PIECE)] for region in regions]
        total = pieces[0] + pieces[1]
        for piece in pieces[2:]:
            total += piece
        for piece in pieces:
            piece.copy_(total)
