"""The consumer's end of asynchronous loading: elements in order out of the ring, or an error."""

from __future__ import annotations

import contextlib
import enum
import os
import time
from multiprocessing import util
from typing import Any

from .._base import env, log
from .._base.errors import AssertionFailure, Error
from ..enums import SharingStrategy
from . import ring
from .channel import ALL_ROWS, Kind, Message
from .process import Process
from .worker import Settings

_CHECK_SECONDS = 0.2  # how soon a killed worker is noticed
_NEGLIGIBLE = 0.05  # share of waiting below which loading is not what limits a run


class _At(enum.Enum):
    BEGINNING = enum.auto()
    MIDDLE = enum.auto()
    END = enum.auto()
    END_WITH_MORE = enum.auto()  # the worker loads the next iteration already
    ERROR = enum.auto()


class Consumer:
    """Reads the elements of a data set that another process loads.

    ``iteration`` counts those that were begun; ``elements`` those taken in it, its end included.
    """

    def __init__(self, source: Any, strategy: SharingStrategy, settings: Settings) -> None:
        self.iteration = self.elements = 0
        self._first_asked = self._waited = 0.0  # seconds
        self._at = _At.BEGINNING
        self._workers_iteration = 0  # the number, for the worker, of the one that is read
        self._is_started = settings.preload
        self._current: ring.Tensors = []
        self._failure = ""
        self._poisons = env.get("POPTORCH_POISON_BUFFERS")
        try:
            self._process = Process(source, strategy, settings)
        except Exception as error:
            raise _not_started(f"{type(error).__name__}: {error}") from error
        # Runs once: when called, when this object goes, or at the exit of this very process,
        # before multiprocessing waits there for the worker.
        self._stop = util.Finalize(self, self._process.stop, exitpriority=10)
        try:
            self._form, self._slots = self._announcement()
        except BaseException:
            self.stop()
            raise

    @property
    def is_stopped(self) -> bool:
        return not self._stop.still_active()

    def stop(self) -> None:
        """End the worker; elements that were handed out stay valid."""
        self._stop()
        self._current, self._slots = [], []

    def restart(self) -> None:
        """Go to the beginning of an iteration; what is there of it is not loaded again."""
        self._check_usable()
        self.iteration += 1
        self.elements, self._waited = 0, 0.0
        if self._at is not _At.BEGINNING:
            self._workers_iteration += 1
        if self._at in (_At.BEGINNING, _At.END_WITH_MORE):
            self._start_loading()
        else:
            self._begin_anew()
        self._at = _At.BEGINNING

    def next(self) -> Any:
        """Return the next element: views of the ring that are valid until the next call."""
        self._check_usable()
        if self._at in (_At.END, _At.END_WITH_MORE):
            raise StopIteration
        if self._at is _At.ERROR:
            raise self._fail(self._failure)
        self._start_loading()
        self._release_current()
        asked = time.perf_counter()
        message = self._message()
        arrived = time.perf_counter()
        if not self.elements:
            self._first_asked = asked
        self.elements += 1
        self._waited += arrived - asked
        if message.kind is Kind.END:
            self._at = _At.END_WITH_MORE if message.rows else _At.END
            text = verdict(self._waited, arrived - self._first_asked)
            log.python.debug("%d elements: %s", self.elements - 1, text)
            raise StopIteration
        if message.kind is Kind.ERROR:
            raise self._fail(message.text)
        self._at = _At.MIDDLE
        self._current, rows = self._slots[message.slot], message.rows
        return self._form.join(
            [t.detach() if rows == ALL_ROWS else t[:rows] for t in self._current]
        )

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

    def _release_current(self) -> None:
        if self._current:
            if self._poisons:
                ring.poison(self._current)
            self._current = []
            self._tell(Kind.FREE)

    def _begin_anew(self) -> None:
        if self._poisons:
            ring.poison(self._current)
        self._current = []
        self._is_started = True
        self._tell(Kind.RESTART, self._workers_iteration)
        while self._message().kind is not Kind.RESTARTED:
            pass  # what was sent for the iteration that is given up

    def _tell(self, kind: Kind, number: int = 0) -> None:
        # To a worker that is gone: what it had sent before is still to be read.
        with contextlib.suppress(ConnectionError):
            self._process.channel.send(kind, rows=number)

    def _message(self) -> Message:
        receive = self._process.channel.receive
        try:
            while (message := receive(_CHECK_SECONDS)) is None:
                # Processes that the worker forked may hold its end of the channel open.
                if self._process.exit_code is not None:
                    message = receive(0.0)
                    if message is None:
                        raise EOFError
                    break
        except (EOFError, ConnectionError):
            raise self._fail(self._process.describe_end()) from None
        return message

    def _fail(self, reason: str) -> Error:
        # The reason is kept, not the exception: its traceback would keep the loader alive.
        self._at, self._failure = _At.ERROR, reason
        return AssertionFailure("An error occurred in the data fetcher", got=reason)

    def _announcement(self) -> tuple[ring.Form, list[ring.Tensors]]:
        try:
            message = self._message()
            if message.kind is Kind.FAILED:
                log.python.error("The loading process could not start:\n%s", message.text)
                raise _not_started(message.text, has_arrived=bool(message.slot))
            file = self._process.channel.receive_file()
        except (AssertionFailure, EOFError):
            raise _not_started(self._process.describe_end()) from None
        try:
            return ring.attach(file, message.rows)
        finally:
            os.close(file)


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


def verdict(waited: float, total: float) -> str:
    share = waited / total if total else 0.0
    spent = f"{waited:.2f} s of {total:.2f} s ({share:.0%}) went into waiting for data"
    if share < _NEGLIGIBLE:
        return f"{spent}; the device limits the run, not the host"
    return f"{spent}; the host limits the run, which could take {total - waited:.2f} s"
