"""Start and end the loading process, in one of four ways, and send the data set to it."""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import torch
import torch.multiprocessing

from .._base import log, nested_values
from .._base.processes import is_running
from ..enums import SharingStrategy
from . import producer
from .buffer_ring import aligned
from .channel import Connection, MessageKind

PATIENCE = 10.0  # seconds between the steps of ending a process: ask, interrupt, kill

_NAME = "poptorch-data"
_UNGUARDED = 79  # exit code of a loading process whose script starts a loader on import
_SERVER_GONE = 255  # Python's exit code of a process whose fork server can no longer report it

_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class LoadingProcess:
    """A running loading process and the channel to it. ``stop`` ends it completely."""

    def __init__(
        self, source: Any, strategy: SharingStrategy, settings: producer.LoaderSettings
    ) -> None:
        own_process = multiprocessing.current_process()
        if own_process.name == _NAME and getattr(own_process, "_inheriting", False):
            os._exit(_UNGUARDED)  # silently, because the process that started this one explains it
        context = multiprocessing.get_context(_METHODS[strategy])
        forks = strategy is SharingStrategy.Fork
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.channel = Connection(ours)
        parsers = nested_values.registered() if forks else _picklable_parsers()
        load = Pickled((source, parsers), on_disk=strategy is SharingStrategy.FileSystem)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=producer.main,
            args=(
                theirs,
                ours if forks else None,
                load,
                settings,
                "fork" if forks else multiprocessing.get_start_method(allow_none=True),
            ),
            name=_NAME,
        )
        try:
            with theirs, _prepared(strategy):
                self._process.start()
        except BaseException:
            self.channel.close()
            raise
        finally:
            load.close()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        code: int | None = self._process.exitcode
        if code == _SERVER_GONE and is_running(self._process.pid):
            return None
        return code

    def describe_end(self) -> str:
        self._process.join(PATIENCE)  # its connection may end shortly before the process
        code = self._process.exitcode
        if code is None:
            return "the loading process closed its connection"
        if code == _UNGUARDED:
            return "the loading process imports the script, which starts a loader again"
        if code < 0:
            name = signal.Signals(-code).name
            return f"the loading process was killed by {name}"
        return f"the loading process ended with exit code {code}"

    def stop(self) -> None:
        """Ask the process to end, interrupt it after 10 s, and kill it after another 10 s."""
        process, group = self._process, self._process.pid
        workers = members(group)
        with contextlib.suppress(OSError):
            self.channel.send(MessageKind.STOP)
        self.channel.close()
        process.join(PATIENCE)
        if process.exitcode is None:
            log.python.warning("The loading process did not stop in time and is interrupted")
            _signal(os.kill, group, signal.SIGINT)
            process.join(PATIENCE)
        workers, patience = workers | members(group), 1.0
        if process.exitcode != 0:
            # Torch's workers are in the process group, and nothing else would end them immediately.
            _signal(os.killpg, group, signal.SIGKILL)
            process.kill()
            process.join()
            patience = PATIENCE  # a killed process does not disappear at once
        process.close()
        producer.remove_segments(workers, patience)


def members(group: int) -> set[int]:
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended, or is hidden
            if os.getpgid(pid) == group and is_running(pid):
                found.add(pid)
    return found


def _signal(send_signal: Any, target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send_signal(target, number)


def _picklable_parsers() -> dict[type, nested_values.Parser]:
    """Return the registered parsers that another process can use: not those of local classes."""
    parsers = {}
    for kind, parser in nested_values.registered().items():
        try:
            pickle.dumps((kind, parser))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            log.python.debug("The loading process has no parser for %s: %s", kind, error)
        else:
            parsers[kind] = parser
    return parsers


@contextlib.contextmanager
def _prepared(strategy: SharingStrategy) -> Iterator[None]:
    """Start a process so that Ctrl-C during its start-up prints no traceback."""
    if strategy is SharingStrategy.ForkServer:
        producer.preload()
        yield
        return
    # The new process inherits the signal mask and removes it when it can handle interrupts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Sending the data set.


class Pickled:
    """A value that is pickled when a process is started, and unpickled there when called.

    Tensors and arrays are sent in one file that the receiver maps. Torch's own method opens a file
    descriptor per tensor, and a list of samples contains too many.
    """

    def __init__(self, value: Any, on_disk: bool = False) -> None:
        self._value, self._on_disk = value, on_disk
        self._descriptor: int | None = None

    def __call__(self) -> Any:
        return self._value

    def __reduce__(self) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _TensorPickler(stream, buffers).dump(self._value)
        content = [*(buffer.raw() for buffer in buffers), stream.getbuffer()]
        places, end = [], 0
        for part in content:
            places.append(slice(end, end + part.nbytes))
            end += aligned(part.nbytes)
        self._descriptor = _disk_file() if self._on_disk else os.memfd_create("poptorch_dataset")
        os.posix_fallocate(self._descriptor, 0, end)
        with mmap.mmap(self._descriptor, end) as memory:
            for part, place in zip(content, places, strict=True):
                memory[place] = part
        return functools.partial, (_received, reduction.DupFd(self._descriptor), places)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _disk_file() -> int:
    with tempfile.TemporaryFile(prefix="poptorch_dataset_") as file:
        return os.dup(file.fileno())


def _received(file: Any, places: Sequence[slice]) -> Any:
    """Unpickle the value. Its arrays are copy-on-write views of the sender's copy."""
    descriptor = file.detach()
    try:
        memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
    *buffers, content = (memory[place] for place in places)
    return pickle.loads(content, buffers=buffers)


class _TensorPickler(ForkingPickler):
    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # Positional arguments: protocol, fix_imports, and what receives the out-of-band buffers.
        super().__init__(stream, 5, True, buffers.append)
        self._shared = self.dispatch_table[torch.Tensor]
        self.dispatch_table[torch.Tensor] = self._reduce

    def _reduce(self, tensor: torch.Tensor) -> Any:
        is_shared = tensor.is_shared()  # type: ignore[no-untyped-call]
        if is_shared or not _is_plain(tensor):
            return self._shared(tensor)
        content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), tensor.dtype, tuple(tensor.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and 0 < tensor.nbytes <= tensor.untyped_storage().nbytes()  # not expanded
        and not (tensor.requires_grad or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
