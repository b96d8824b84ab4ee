"""Run in the loading process: iterate over the data set and keep the ring of buffers full.

``loading_process`` starts and ends this process, and ``consumer`` reads from the ring in the user's
process. "Workers" are always the processes of torch's own loaders, which the data set may start.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._base import nested_values
from .._base.errors import Error
from .._base.processes import is_running
from .._ir.tensors import Tensors
from . import buffer_ring
from .channel import Connection, MessageKind

Contents = tuple[
    Any, dict[type, nested_values.Parser]
]  # a data set, and the parsers for its elements


@dataclass(frozen=True)
class LoaderSettings:
    slots: int  # number of buffers in the ring
    pause: float  # seconds of the first sleep while the ring is full; 0 spins
    goes_on: bool  # start the next iteration of the data set immediately after the last one
    preload: bool  # fill the ring before the first iteration is requested
    rebatched: int | None  # rows of the batches to combine; None passes elements on as they are
    drop_last: bool  # drop an incomplete batch at the end when combining
    seed: int  # for the random generators of the process


_NOTHING = object()
_LONGEST_PAUSE = 0.004  # seconds; a longer wait is ended by a message from the consumer
_SHARED_MEMORY = Path("/dev/shm")


# Neither is an error, and the data set's own error handlers must not catch them.
class _Restart(BaseException):
    """The consumer requested the iteration with this number."""


class _Stop(BaseException):
    """The consumer requested the end, or is gone."""


def main(
    end: socket.socket,
    inherited: socket.socket | None,
    load: Callable[[], Contents],
    settings: LoaderSettings,
    start_method: str | None,
) -> None:
    """Run the process until the consumer requests the end or is gone.

    Args:
        end: this process's end of the channel.
        inherited: the consumer's end, which a forked process also has and must close.
        load: returns the data set and the parsers.
        settings: how to load.
        start_method: how to start torch's workers; None is Python's default.
    """
    _set_up_process(inherited, settings.seed)
    # Forked workers of torch already have torch in memory. By default, Python would start them from
    # another server here, and each of them would import torch.
    multiprocessing.set_start_method(start_method, force=True)
    preload()
    producer = _Producer(Connection(end), settings)
    # Nobody waits for this process, or somebody pressed Ctrl-C, which the consumer's process
    # reports.
    with contextlib.suppress(_Stop, KeyboardInterrupt, EOFError, ConnectionError):
        producer.run(load)
    producer.end()


def _set_up_process(inherited: socket.socket | None, seed: int) -> None:
    # A forked process must not finalise objects that it has inherited.
    gc.freeze()
    if inherited is not None:
        inherited.close()
    # A separate process group: the consumer handles Ctrl-C at the terminal, and it can end this
    # process's workers even after this process was killed.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit_cleanly)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(write_through=True)
    # The cores are for the model, and an OpenMP pool does not survive the workers' forks.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def preload() -> None:
    """Make the fork server import torch once, unless the program has chosen what it imports."""
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", __name__])


def _exit_cleanly(number: int, frame: object) -> None:
    raise _Stop


class _Producer:
    def __init__(self, channel: Connection, settings: LoaderSettings) -> None:
        self._channel = channel
        self._settings = settings
        consumer = multiprocessing.parent_process()
        assert consumer is not None
        channel.watch(consumer.sentinel)
        self._started = settings.preload
        self._published = 0
        self._freed = 0
        self._source: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._workers: set[int] = set()  # torch's workers
        self._iterations = 0  # number of iterations that were started
        # the index of the first permutation, if the loader shuffles for several processes
        self._first_order: int | None = None
        self._form: buffer_ring.Form
        self._slots: list[Tensors]

    def run(self, load: Callable[[], Contents]) -> None:
        has_arrived = False
        try:
            self._source, parsers = load()
            has_arrived = True
            for kind, parser in parsers.items():
                nested_values.register(kind, parser)
            self._first_order = getattr(self._source, "_order_index", None)
            first = self._begin()
        except Exception as error:
            self._channel.send(MessageKind.FAILED, slot=has_arrived, text=_traceback(error))
            return
        elements = self._elements(first)
        while True:
            try:
                self._run_iteration(elements)
            except _Restart as restart:
                (self._iterations,) = restart.args  # some may have been started ahead
                self._published = self._freed = 0
                self._started = True
                self._channel.send(MessageKind.RESTARTED, rows=self._iterations)
            self.end()
            elements = self._elements()

    def end(self) -> None:
        # A loader's persistent workers can be used again only after the old iterator is gone.
        self._iterator = iter(())
        self._workers = remove_segments(self._workers)

    def _begin(self) -> list[torch.Tensor]:
        self._start()
        first = next(self._iterator, _NOTHING)
        if first is _NOTHING:
            raise Error("The Dataset is empty", fix="add at least one element to the data set")
        self._form = buffer_ring.Form.of(first)
        tensors = self._form.split(first)
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        size = self._settings.rebatched
        if size is not None:
            buffer_ring.common_rows(tensors)
            specs = [((size, *shape[1:]), dtype) for shape, dtype in specs]
        file, end, self._slots = buffer_ring.create(self._form, specs, self._settings.slots)
        self._channel.send(MessageKind.READY, rows=end)
        self._channel.send_file(file)
        os.close(file)
        return tensors

    def _start(self) -> None:
        if self._first_order is not None:
            self._source._order_index = self._first_order + self._iterations
        self._iterations += 1
        self._iterator = iterate(self._source)
        self._workers |= {child.pid for child in multiprocessing.active_children() if child.pid}

    def _elements(self, first: list[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
        if first is None:
            self._start()
        else:
            yield first
            while not self._started:
                self._obey(waits=True)
        while (element := next(self._iterator, _NOTHING)) is not _NOTHING:
            self._obey()  # before the element is stored in a ring that must be emptied
            yield self._form.split(element)

    def _run_iteration(self, elements: Iterator[list[torch.Tensor]]) -> None:
        """Publish one iteration of the data set, then wait unless the next one may follow."""
        rebatched, goes_on, before = self._settings.rebatched, False, self._published
        try:
            if rebatched is None:
                filled = buffer_ring.fill_whole(elements, self._claim)
            else:
                drop_last = self._settings.drop_last
                filled = buffer_ring.fill_packed(elements, self._claim, rebatched, drop_last)
            for rows in filled:
                slot = self._published % self._settings.slots
                self._published += 1
                self._channel.send(MessageKind.ITEM, slot, rows)
        except Exception as error:
            self._channel.send(MessageKind.ERROR, text=_traceback(error))
        else:
            self.end()
            # Do not repeat an iteration without elements, because this could loop forever.
            goes_on = self._settings.goes_on and self._published > before
            self._channel.send(MessageKind.END, rows=goes_on)
        while not goes_on:
            self._obey(waits=True)

    def _claim(self) -> Tensors:
        self._obey()
        pause, slots = self._settings.pause, self._settings.slots
        while self._published - self._freed == slots:
            # Waking a process costs the consumer about 15 us. Short sleeps avoid this without a
            # noticeable delay: none is longer than the time for which the ring has been full, and
            # another element is ready.
            if pause > _LONGEST_PAUSE or slots == 1:
                self._obey(waits=True)
            else:
                time.sleep(pause)
                pause *= 2
                self._obey()
        return self._slots[self._published % slots]

    def _obey(self, waits: bool = False) -> None:
        while (message := self._channel.receive(None if waits else 0.0)) is not None:
            waits = False
            if message.kind is MessageKind.FREE:
                self._freed += 1
            elif message.kind is MessageKind.START:
                self._started = True
            elif message.kind is MessageKind.RESTART:
                raise _Restart(message.rows)
            else:
                raise _Stop
        if waits:
            raise _Stop  # the watch on the consumer's process has returned


def iterate(source: Any) -> Iterator[Any]:
    if not hasattr(source, "__iter__") and hasattr(source, "__len__"):
        return (source[index] for index in range(len(source)))
    iterator: Iterator[Any] = iter(source)
    # Torch installs a handler that raises when one of its workers dies. While a message is sent to
    # the consumer, this would end this process. Without the handler, torch notices within 5
    # seconds.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return iterator


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    # Errors of torch's workers refer to themselves through frames that refer to torch's iterator.
    traceback.clear_frames(error.__traceback__)
    return text


def remove_segments(processes: set[int], seconds: float = 0.0) -> set[int]:
    """Remove the shared memory of torch's workers that have ended; return those that still run.

    A worker that is killed after it has named its memory, and before it has removed the name, would
    leave the memory until a restart.
    """
    end, running = time.monotonic() + seconds, set(filter(is_running, processes))
    while running and time.monotonic() < end:
        time.sleep(0.001)
        running = set(filter(is_running, running))
    gone = {str(pid) for pid in processes - running}
    for path in _SHARED_MEMORY.glob("torch_*_*") if gone and _SHARED_MEMORY.is_dir() else ():
        if path.name.split("_")[1] in gone:
            with contextlib.suppress(OSError):
                path.unlink()
    return running
