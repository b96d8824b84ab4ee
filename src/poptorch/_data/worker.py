"""The loading process: iterates the data set and keeps the ring of buffers full.

Source: spec/data.md sections 3.5 to 3.8.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .._base import trees
from .._base.errors import Error
from .element import Form, TensorSpec
from .filling import common_rows, packed, whole
from .protocol import MAX_TEXT, Failed, Kind, Ready, receive, send
from .ring import Ring, reserve, size_of


@dataclass(frozen=True)
class Settings:
    """How a worker loads.

    Attributes:
        slots: buffers in the ring.
        spin: wait for a free buffer without sleeping.
        goes_on: begin the next iteration of the data set at the end of one, unasked.
        preload: fill the ring before the first iteration is asked for.
        rebatched: rows of the batches to assemble, or None to pass elements on as they are.
        drop_last: drop the incomplete batch at the end, when assembling.
        seed: of the random generators of the process.
    """

    slots: int
    spin: bool
    goes_on: bool
    preload: bool
    rebatched: int | None
    drop_last: bool
    seed: int


_NOTHING = object()


# Neither is an error, and the data set's own handlers of errors must not catch them.
class _Restart(BaseException):
    """The consumer asked for a new iteration."""


class _Stop(BaseException):
    """The consumer asked to end, or is gone."""


def main(
    connection: Connection,
    inherited: Connection | None,
    memory: Any,
    parcel: Any,
    settings: Settings,
) -> None:
    """Run the process until the consumer says stop or is gone.

    Args:
        connection: to the consumer.
        inherited: the consumer's own end, which a forked process has too and must close.
        memory: what holds the descriptor of the ring's empty file.
        parcel: what opens to (data set, registered parsers).
        settings: how to load.
    """
    _set_up_process(inherited, settings.seed)
    try:
        worker = _Worker(connection, memory.detach(), settings)
        worker.run(parcel)
    except (_Stop, KeyboardInterrupt, EOFError, ConnectionError):
        # Nobody waits for us, or somebody pressed Ctrl-C: the consumer's process tells about it.
        pass


def _set_up_process(inherited: Connection | None, seed: int) -> None:
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
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _exit_cleanly(number: int, frame: object) -> None:
    raise _Stop


class _Worker:
    """The state of a loading process: counts of buffers, and the iteration it is in."""

    def __init__(self, connection: Connection, descriptor: int, settings: Settings) -> None:
        self._connection = connection
        self._descriptor = descriptor
        self._settings = settings
        parent = multiprocessing.parent_process()
        assert parent is not None
        self._consumer = parent.sentinel
        self._started = settings.preload
        self._published = 0
        self._freed = 0
        self._source: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._form: Form
        self._ring: Ring

    def run(self, parcel: Any) -> None:
        """Load and announce the first element, then run one iteration after another."""
        try:
            self._source, parsers = parcel.open()
            for kind, parser in parsers.items():
                trees.register(kind, parser)
            first = self._begin()
        except Exception as error:
            traceback.print_exc()
            self._connection.send_bytes(pickle.dumps(_failed(error)))
            return
        elements = self._first_elements(first)
        while True:
            try:
                self._run_iteration(elements)
            except _Restart:
                self._published = self._freed = 0
                self._started = True
                send(self._connection, Kind.RESTARTED)
            # Only when the old iterator is gone can a loader's persistent workers be used again.
            self._iterator = iter(())
            elements = self._elements()

    def _begin(self) -> list[torch.Tensor]:
        """Load one element, lay out the ring after it, and announce both."""
        self._iterator = iterate(self._source)
        first = next(self._iterator, _NOTHING)
        if first is _NOTHING:
            raise Error("The Dataset is empty", fix="give it at least one element")
        self._form = Form.of(first)
        tensors = self._form.split(first)
        specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if self._settings.rebatched is not None:
            common_rows(tensors)
            specs = tuple(spec.with_rows(self._settings.rebatched) for spec in specs)
        reserve(self._descriptor, size_of(specs, self._settings.slots))
        self._ring = Ring(self._descriptor, specs, self._settings.slots)
        os.close(self._descriptor)
        self._connection.send_bytes(pickle.dumps(Ready(self._form, specs)))
        return tensors

    def _first_elements(self, first: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        yield first
        while not self._started:
            self._wait_for_command()
        yield from self._rest()

    def _elements(self) -> Iterator[list[torch.Tensor]]:
        self._iterator = iterate(self._source)
        yield from self._rest()

    def _rest(self) -> Iterator[list[torch.Tensor]]:
        for element in self._iterator:
            self._obey_commands()  # before the element gets into a ring that must be forgotten
            yield self._form.split(element)

    def _run_iteration(self, elements: Iterator[list[torch.Tensor]]) -> None:
        """Publish one iteration of the data set, then wait unless the next one may follow."""
        rebatched, goes_on, before = self._settings.rebatched, False, self._published
        try:
            if rebatched is None:
                filled = whole(elements, self._claim)
            else:
                filled = packed(elements, self._claim, rebatched, self._settings.drop_last)
            for rows in filled:
                slot = self._published % self._settings.slots
                self._published += 1
                send(self._connection, Kind.ITEM, slot, rows)
        except Exception as error:
            send(self._connection, Kind.ERROR)
            self._connection.send_bytes(pickle.dumps(_failed(error)))
        else:
            # An iteration without elements is not repeated: it could go round for ever.
            goes_on = self._settings.goes_on and self._published > before
            send(self._connection, Kind.END, rows=goes_on)
        while not goes_on:
            self._wait_for_command()

    def _claim(self) -> list[torch.Tensor]:
        """Wait for a free buffer."""
        self._obey_commands()
        while self._published - self._freed == self._settings.slots:
            if self._settings.spin:
                self._obey_commands()
            else:
                self._wait_for_command()
        return self._ring.slots[self._published % self._settings.slots]

    def _wait_for_command(self) -> None:
        if self._consumer in wait([self._connection, self._consumer]):
            raise _Stop
        self._obey_commands()

    def _obey_commands(self) -> None:
        while self._connection.poll():
            kind, _, _ = receive(self._connection)
            if kind is Kind.FREE:
                self._freed += 1
            elif kind is Kind.START:
                self._started = True
            elif kind is Kind.RESTART:
                raise _Restart
            else:
                raise _Stop


def iterate(source: Any) -> Iterator[Any]:
    """Iterate anything: by its own iterator, or by index as far as its length goes."""
    if hasattr(source, "__iter__") or not hasattr(source, "__len__"):
        return iter(source)
    return (source[index] for index in range(len(source)))


def _failed(error: BaseException) -> Failed:
    return Failed("".join(traceback.format_exception(error))[-MAX_TEXT:])
