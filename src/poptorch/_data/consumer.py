"""The consumer's end of asynchronous loading: elements in order out of the ring, or an error.

Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

import contextlib
import enum
import os
from multiprocessing import util
from typing import Any

import torch

from .._base import env, log
from .._base.errors import AssertionFailure, Error
from ..enums import SharingStrategy
from .process import Process
from .protocol import ALL_ROWS, Failed, Kind, Message, Ready
from .ring import Ring, nameless_file, poison
from .waiting import Waiting
from .worker import Settings

_CHECK_SECONDS = 0.2  # how soon a killed worker is noticed


class _At(enum.Enum):
    """Where in an iteration of the data set the consumer is."""

    BEGINNING = enum.auto()
    MIDDLE = enum.auto()
    END = enum.auto()
    END_WITH_MORE = enum.auto()  # the worker loads the next iteration already
    ERROR = enum.auto()


class Consumer:
    """Reads the elements of a data set that another process loads.

    Args:
        source: what to iterate over in the other process.
        strategy: how that process comes into being.
        settings: how it loads.

    Attributes:
        turn: how many iterations were begun.
        waiting: how long the consumer waited for elements.

    Raises:
        Error: the worker did not get as far as the first element.
    """

    def __init__(self, source: Any, strategy: SharingStrategy, settings: Settings) -> None:
        self.turn = 0
        self.waiting = Waiting()
        self._at = _At.BEGINNING
        self._iteration = 0  # of the worker's, whose elements are read
        self._is_started = settings.preload
        self._held: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = []
        self._failure = ""
        self._poisons = env.get("POPTORCH_POISON_BUFFERS")
        descriptor = nameless_file("poptorch_ring")
        try:
            self._process = _start(source, descriptor, strategy, settings)
            # Runs once: when called, when this object goes, or at the exit of this very process,
            # before multiprocessing waits there for the worker.
            self._stop = util.Finalize(self, self._process.stop, exitpriority=10)
            try:
                ready = self._announcement()
            except BaseException:
                self.stop()
                raise
            self._form = ready.form
            self._slots = Ring(descriptor, ready.specs, settings.slots).slots
        finally:
            os.close(descriptor)

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return not self._stop.still_active()

    def stop(self) -> None:
        """End the worker; elements that were handed out stay valid from now on."""
        self._stop()
        self._held, self._slots = [], []

    def restart(self) -> None:
        """Go to the beginning of an iteration.

        Nothing is loaded again when none of the elements was taken, or when the worker has begun
        the next iteration after the end of one; otherwise the worker begins anew.
        """
        self._check_usable()
        self.turn += 1
        self.waiting.reset()
        if self._at is not _At.BEGINNING:
            self._iteration += 1
        if self._at in (_At.BEGINNING, _At.END_WITH_MORE):
            self._start_loading()
        else:
            self._begin_anew()
        self._at = _At.BEGINNING

    def next(self) -> Any:
        """Return the next element: views of the ring that are valid until the next call.

        Raises:
            StopIteration: the iteration has ended.
            AssertionFailure: the data set raised, or the worker is gone.
        """
        self._check_usable()
        if self._at in (_At.END, _At.END_WITH_MORE):
            raise StopIteration
        if self._at is _At.ERROR:
            raise self._fail(self._failure)
        self._start_loading()
        self._release_held()
        self.waiting.begin()
        message = self._message()
        self.waiting.end()
        if message.kind is Kind.END:
            self._at = _At.END_WITH_MORE if message.rows else _At.END
            self.waiting.report()
            raise StopIteration
        if message.kind is Kind.ERROR:
            raise self._fail(message.load().text)
        self._at = _At.MIDDLE
        self._held, rows = self._slots[message.slot], message.rows
        return self._form.join([t.detach() if rows == ALL_ROWS else t[:rows] for t in self._held])

    def _check_usable(self) -> None:
        if self.is_stopped:
            raise AssertionFailure(
                "The asynchronous loader has been terminated",
                fix="create a new one; terminate() is for the end of the program",
            )

    def _start_loading(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._tell(Kind.START)

    def _release_held(self) -> None:
        if self._held:
            if self._poisons:
                poison(self._held)
            self._held = []
            self._tell(Kind.FREE)

    def _begin_anew(self) -> None:
        if self._poisons:
            poison(self._held)
        self._held = []
        self._is_started = True
        self._tell(Kind.RESTART, self._iteration)
        while self._message().kind is not Kind.RESTARTED:
            pass  # what was sent for the iteration that is given up

    def _tell(self, kind: Kind, number: int = 0) -> None:
        # To a worker that is gone: what it had sent before is still to be read.
        with contextlib.suppress(ConnectionError):
            self._process.channel.send(kind, rows=number)

    def _message(self) -> Message:
        """Wait for the worker's next message, or for its end."""
        channel = self._process.channel
        try:
            while not channel.has_message(_CHECK_SECONDS):
                # Processes that the worker forked may hold its end of the channel open.
                if self._process.exit_code is not None and not channel.has_message():
                    raise EOFError
            return channel.receive()
        except (EOFError, ConnectionError):
            raise self._fail(self._process.describe_end()) from None

    def _fail(self, reason: str) -> Error:
        # The reason is kept, not the exception: its traceback would keep the loader alive.
        self._at, self._failure = _At.ERROR, reason
        return AssertionFailure("An error occurred in the data fetcher", got=reason)

    def _announcement(self) -> Ready:
        """Wait for the first element."""
        try:
            message = self._message()
        except AssertionFailure:
            raise _not_started(self._process.describe_end()) from None
        self._process.started()
        if message.kind is Kind.READY:
            ready: Ready = message.load()
            return ready
        failed: Failed = message.load()
        log.python.error("The loading process could not start:\n%s", failed.text)
        raise _not_started(failed.text, failed.has_arrived)


def _start(source: Any, descriptor: int, strategy: SharingStrategy, settings: Settings) -> Process:
    try:
        return Process(source, descriptor, strategy, settings)
    except Exception as error:
        raise _not_started(f"{type(error).__name__}: {error}") from error


def _not_started(reason: str, has_arrived: bool = False) -> Error:
    title = "The asynchronous loader's worker thread failed to start"
    if has_arrived:
        return Error(title, got=reason)  # the data set's own fault: its traceback tells all
    return Error(
        title,
        got=reason,
        fix=(
            "data set, collate_fn and worker_init_fn must be picklable and importable, and the"
            ' script needs the guard: if __name__ == "__main__":',
            "or share them by fork: async_options={'sharing_strategy':"
            " poptorch.SharingStrategy.Fork}",
        ),
    )
