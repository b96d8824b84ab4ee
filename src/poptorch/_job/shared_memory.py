"""Share memory between the processes of a job on one machine, to sum without a network.

Each process sums one part of all processes' memory and writes the sum to all of it. For each byte
of a gradient a process reads one and writes one, without any copy. A region has no name in a file
system, and is freed when the processes that have opened it end for any reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
import weakref
from collections.abc import Sequence

import torch

_PIECE = 1 << 16  # elements that are summed at once, because they fit a core's cache
_LINE = 64  # elements; parts of different processes do not share a cache line

# What a process may name: one of its own files that has no name in a file system.
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_CALLED = re.compile(r"poptorch-[0-9a-f]{32}")

Regions = list[torch.Tensor]  # one tensor in each process, in the order of processes


class CommonMemory:
    """The tensors of this process that others can map, and where those of others are."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by address
        self._regions: dict[int, Regions] = {}  # by address; empty if some processes cannot map it

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in its own region."""
        name = f"poptorch-{uuid.uuid4().hex}"  # described by _CALLED
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
        """Return where others find these tensors; empty if they cannot."""
        names = [self._names.get(each.data_ptr(), "") for each in tensors]
        return names if all(names) else []

    def regions(self, tensors: Sequence[torch.Tensor]) -> list[Regions] | None:
        """Return the regions of tensors; None if they were not looked up."""
        found = [self._regions.get(each.data_ptr()) for each in tensors]
        return None if None in found else found  # type: ignore[return-value]

    def find(
        self, tensors: Sequence[torch.Tensor], names: Sequence[Sequence[str]]
    ) -> list[Regions]:
        """Return the regions with the names that processes have sent; empty if some cannot be
        mapped.

        This process's own regions are mapped again, because its tensors may be released by the
        program's state.
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
    """Map a region that another process has named, if it was made by ``zeros``.

    Anybody who writes to the store chooses the name. A name that could mean a file, a region of
    another size or one of another user is refused, before anything is mapped or changed.
    """
    path, _, called = name.partition(" ")
    if not (_PATH.fullmatch(path) and _CALLED.fullmatch(called)):
        raise FileNotFoundError(f"{name!r} names no region of a job")
    _check_file(path, called)  # before it is opened, because opening a device may have effects
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        opened, status = f"/proc/self/fd/{descriptor}", os.fstat(descriptor)
        _check_file(opened, called)
        if status.st_nlink or status.st_uid != os.getuid() or status.st_size != like.nbytes:
            raise FileNotFoundError(f"{name!r} is not a region of this user and of this size")
        return torch.from_file(opened, shared=True, size=like.numel(), dtype=like.dtype)
    finally:
        os.close(descriptor)


def _check_file(path: str, called: str) -> None:
    """Refuse other files, because processes in other containers may have the same numbers."""
    if os.readlink(path) != f"/memfd:{called} (deleted)":
        raise FileNotFoundError(f"{path} is not the region {called}")


def add_up(regions: Regions, index: int) -> None:
    """Sum a process's part of a tensor, and write the sums to the regions of all processes."""
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
