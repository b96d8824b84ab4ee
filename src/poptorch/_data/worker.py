"""The loading process: iterates the data set and keeps the ring of buffers full."""

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

from .._base import trees
from .._base.errors import Error
from .._base.processes import is_running
from . import ring
from .channel import Channel, Kind

Contents = tuple[Any, dict[type, trees.Parser]]  # a data set, and the parsers of its elements


@dataclass(frozen=True)
class Settings:
    slots: int  # buffers in the ring
    pause: float  # seconds of the first sleep while the ring is full; 0 spins
    goes_on: bool  # begin the next iteration of the data set at the end of one, unasked
    preload: bool  # fill the ring before the first iteration is asked for
    rebatched: int | None  # rows of the batches to assemble; None passes elements on as they are
    drop_last: bool  # drop the incomplete batch at the end, when assembling
    seed: int  # of the random generators of the process


_NOTHING = object()
_LONGEST_PAUSE = 0.004  # seconds; who waits longer is woken by the consumer's message
_SHARED_MEMORY = Path("/dev/shm")


# Neither is an error, and the data set's own handlers of errors must not catch them.
class _Restart(BaseException):
    """The consumer asked for the iteration of this number."""


class _Stop(BaseException):
    """The consumer asked to end, or is gone."""


def main(
    end: socket.socket,
    inherited: socket.socket | None,
    load: Callable[[], Contents],
    settings: Settings,
    start_method: str | None,
) -> None:
    """Run the process until the consumer says stop or is gone.

    Args:
        inherited: the consumer's own end, which a forked process has too and must close.
        start_method: how to start torch's workers; None is Python's default.
    """
    _set_up_process(inherited, settings.seed)
    # Forked, torch's workers have torch in their memory; started by a server of their own, which
    # Python would otherwise do here, each of them imports it.
    multiprocessing.set_start_method(start_method, force=True)
    preload()
    worker = _Worker(Channel(end), settings)
    # Nobody waits for us, or somebody pressed Ctrl-C: the consumer's process tells about it.
    with contextlib.suppress(_Stop, KeyboardInterrupt, EOFError, ConnectionError):
        worker.run(load)
    worker.end()


def _set_up_process(inherited: socket.socket | None, seed: int) -> None:
    # What a forked process has inherited is not its own to finalise.
    gc.freeze()
    if inherited is not None:
        inherited.close()
    # Of its own group: Ctrl-C at the terminal is for the consumer to handle, and the consumer can
    # end this process's own workers even after this process was killed.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit_cleanly)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(write_through=True)
    # The cores are for the model; and an OpenMP pool does not survive the workers' forks.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def preload() -> None:
    """Let the fork server import torch once, unless the program has chosen what it imports."""
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", __name__])


def _exit_cleanly(number: int, frame: object) -> None:
    raise _Stop


class _Worker:
    def __init__(self, channel: Channel, settings: Settings) -> None:
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
        self._workers: set[int] = set()  # torch's own
        self._iterations = 0  # that were begun
        self._first_order: int | None = None  # of a loader that shuffles for several processes
        self._form: ring.Form
        self._slots: list[ring.Tensors]

    def run(self, load: Callable[[], Contents]) -> None:
        has_arrived = False
        try:
            self._source, parsers = load()
            has_arrived = True
            for kind, parser in parsers.items():
                trees.register(kind, parser)
            self._first_order = getattr(self._source, "_order_index", None)
            first = self._begin()
        except Exception as error:
            self._channel.send(Kind.FAILED, slot=has_arrived, text=_traceback(error))
            return
        elements = self._elements(first)
        while True:
            try:
                self._run_iteration(elements)
            except _Restart as restart:
                (self._iterations,) = restart.args  # some may have been begun ahead
                self._published = self._freed = 0
                self._started = True
                self._channel.send(Kind.RESTARTED, rows=self._iterations)
            self.end()
            elements = self._elements()

    def end(self) -> None:
        # Only when the old iterator is gone can a loader's persistent workers be used again.
        self._iterator = iter(())
        self._workers = remove_segments(self._workers)

    def _begin(self) -> list[torch.Tensor]:
        self._start()
        first = next(self._iterator, _NOTHING)
        if first is _NOTHING:
            raise Error("The Dataset is empty", fix="add at least one element to the data set")
        self._form = ring.Form.of(first)
        tensors = self._form.split(first)
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        size = self._settings.rebatched
        if size is not None:
            ring.common_rows(tensors)
            specs = [((size, *shape[1:]), dtype) for shape, dtype in specs]
        file, end, self._slots = ring.create(self._form, specs, self._settings.slots)
        self._channel.send(Kind.READY, rows=end)
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
            self._obey()  # before the element gets into a ring that must be forgotten
            yield self._form.split(element)

    def _run_iteration(self, elements: Iterator[list[torch.Tensor]]) -> None:
        """Publish one iteration of the data set, then wait unless the next one may follow."""
        rebatched, goes_on, before = self._settings.rebatched, False, self._published
        try:
            if rebatched is None:
                filled = ring.fill_whole(elements, self._claim)
            else:
                drop_last = self._settings.drop_last
                filled = ring.fill_packed(elements, self._claim, rebatched, drop_last)
            for rows in filled:
                slot = self._published % self._settings.slots
                self._published += 1
                self._channel.send(Kind.ITEM, slot, rows)
        except Exception as error:
            self._channel.send(Kind.ERROR, text=_traceback(error))
        else:
            self.end()
            # An iteration without elements is not repeated: it could go round for ever.
            goes_on = self._settings.goes_on and self._published > before
            self._channel.send(Kind.END, rows=goes_on)
        while not goes_on:
            self._obey(waits=True)

    def _claim(self) -> ring.Tensors:
        self._obey()
        pause, slots = self._settings.pause, self._settings.slots
        while self._published - self._freed == slots:
            # Waking a process costs the consumer some 15 us. Pauses spare it that as long as they
            # cannot be noticed: none is longer than the ring has been full, and another element
            # is ready meanwhile.
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
            if message.kind is Kind.FREE:
                self._freed += 1
            elif message.kind is Kind.START:
                self._started = True
            elif message.kind is Kind.RESTART:
                raise _Restart(message.rows)
            else:
                raise _Stop
        if waits:
            raise _Stop  # what has returned is the watch on the consumer's process


def iterate(source: Any) -> Iterator[Any]:
    if not hasattr(source, "__iter__") and hasattr(source, "__len__"):
        return (source[index] for index in range(len(source)))
    iterator: Iterator[Any] = iter(source)
    # Torch installs a handler that raises when one of its workers dies. In the middle of a message
    # to the consumer that would end this process; without it, torch notices within 5 seconds.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return iterator


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    # Errors of torch's workers refer to themselves, by way of frames that hold torch's iterator.
    traceback.clear_frames(error.__traceback__)
    return text


def remove_segments(processes: set[int], seconds: float = 0.0) -> set[int]:
    """Remove the shared memory of torch's workers that ended; return those that still run.

    One that is ended between giving memory a name and taking it away leaves it until a restart.
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
