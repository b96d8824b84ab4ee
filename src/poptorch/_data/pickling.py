"""Sending a data set to another process: pickled, with the memory of its arrays beside the pickle.

Tensors and NumPy arrays travel through one file that the receiver maps, whatever their number and
size: torch's own way opens a file descriptor per tensor, of which a list of samples has too many.
Tensors that are in shared memory already stay shared.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from .ring import nameless_file, reserve

_ALIGNMENT = 64


class Pickled:
    """A value that is pickled when the process that will load it is started.

    Args:
        value: what to send.
        through_file_system: use a named temporary file, which ``discard`` removes, in place
            of nameless memory.
    """

    def __init__(self, value: Any, through_file_system: bool = False) -> None:
        self._value = value
        self._through_file_system = through_file_system
        self._descriptor: int | None = None
        self._path: str | None = None

    def __reduce__(self) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, buffers).dump(self._value)
        content = [*(buffer.raw() for buffer in buffers), stream.getbuffer()]
        offsets, end = [], 0
        for part in content:
            offsets.append((end, part.nbytes))
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = self._file()
        reserve(descriptor, end)
        with mmap.mmap(descriptor, end) as memory:
            for part, (start, length) in zip(content, offsets, strict=True):
                memory[start : start + length] = part
        return _Received, (self._path or reduction.DupFd(descriptor), offsets, end)

    def _file(self) -> int:
        if self._through_file_system:
            self._descriptor, self._path = tempfile.mkstemp(prefix="poptorch_dataset_")
        else:
            self._descriptor = nameless_file("poptorch_dataset")
        return self._descriptor

    def discard(self) -> None:
        """Give back the file; the receiver has mapped it, or there will be none."""
        self._value = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._path is not None:
            os.unlink(self._path)
            self._path = None


class _Received:
    """What was pickled, in the receiving process."""

    def __init__(self, source: Any, offsets: list[tuple[int, int]], size: int) -> None:
        self._source, self._offsets, self._size = source, offsets, size

    def load(self) -> Any:
        """Unpickle the value; its arrays are copy-on-write views of the sender's copy."""
        if isinstance(self._source, str):
            descriptor = os.open(self._source, os.O_RDONLY)
        else:
            descriptor = self._source.detach()
        try:
            memory = memoryview(mmap.mmap(descriptor, self._size, access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)
        *buffers, content = (memory[start : start + size] for start, size in self._offsets)
        return pickle.loads(content, buffers=buffers)


class _Pickler(ForkingPickler):
    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # Arguments by position: protocol, fix_imports, and what takes the buffers out of band.
        super().__init__(stream, 5, True, buffers.append)
        self._shared = self.dispatch_table[torch.Tensor]
        self.dispatch_table[torch.Tensor] = self._reduce

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if _is_shared(tensor) or not _is_plain(tensor):
            return self._shared(tensor)
        content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), tensor.dtype, tuple(tensor.shape))


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and 0 < tensor.nbytes <= tensor.untyped_storage().nbytes()  # nothing expanded
        and not (tensor.requires_grad or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
