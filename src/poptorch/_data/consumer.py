"""Read elements in order from the ring that a loading process fills, or raise its errors. Says
whether loading limits the run.
"""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing import util
from typing import Any

from .._base import env, log
from .._base.errors import AssertionFailure, Error
from .._ir.tensors import Tensors
from ..enums import SharingStrategy
from . import buffer_ring
from .channel import ALL_ROWS, Message, MessageKind
from .loading_process import LoadingProcess
from .producer import LoaderSettings

_CHECK_SECONDS = 0.2  # interval at which a killed process is noticed
_GUARD = 'put the training code under the guard: if __name__ == "__main__":'
_DATA_SET = "correct the line of the data set at the end of this traceback"
_SYNC = "to see the error of the data set in this process, use DataLoaderMode.Sync"
_TRAVEL = "make sure that the data set, collate_fn and worker_init_fn can be pickled and imported"
_FORK = "or use fork: async_options={'sharing_strategy': poptorch.SharingStrategy.Fork}"
_NEGLIGIBLE = 0.05  # share of waiting below which loading does not limit a run


class Consumer:
    """Reads the elements of a data set that another process loads."""

    def __init__(self, source: Any, strategy: SharingStrategy, settings: LoaderSettings) -> None:
        # iterations begun; elements taken in this one, including its end
        self.iteration = self.elements = 0
        self._first_request = self._waited = 0.0  # seconds
        self._last: Message | None = None  # the last message that was read in this iteration
        self._producers_iteration = 0  # the producer's number of the iteration that is read
        self._is_started = settings.preload
        self._current: Tensors = []
        self._poisons = env.get("POPTORCH_POISON_BUFFERS")
        try:
            self._process = LoadingProcess(source, strategy, settings)
        except Exception as error:
            raise _not_started(f"{type(error).__name__}: {error}", _TRAVEL, _FORK) from error
        # Runs once: when called, when this object is deleted, or when this process exits, before
        # multiprocessing waits for the loading process.
        self._stop = util.Finalize(self, self._process.stop, exitpriority=10)
        try:
            self._form, self._slots = self._announcement()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the loading process. Elements that were returned stay valid."""
        self._stop()
        self._current, self._slots = [], []

    def restart(self) -> None:
        """Start an iteration from its beginning. Elements that are already loaded for it are not
        loaded again.
        """
        self._check_usable()
        self.iteration += 1
        self.elements, self._waited = 0, 0.0
        last = self._last
        if last is not None:
            self._producers_iteration += 1
        if last is None or (last.kind is MessageKind.END and last.rows):
            self._start_loading()
        else:
            self._restart()
        self._last = None

    def next(self) -> Any:
        """Return the next element: views of the ring that are valid until the next call."""
        self._check_usable()
        if self._last is None or self._last.kind is MessageKind.ITEM:
            self._last = self._next_message()
        if self._last.kind is MessageKind.END:
            raise StopIteration
        if self._last.kind is not MessageKind.ITEM:
            raise self._failed()
        self._current, rows = self._slots[self._last.slot], self._last.rows
        return self._form.join(
            [t.detach() if rows == ALL_ROWS else t[:rows] for t in self._current]
        )

    def _next_message(self) -> Message:
        self._start_loading()
        if self._current:
            self._release()
            self._send(MessageKind.FREE)
        requested = time.perf_counter()
        message = self._message()
        arrived = time.perf_counter()
        if not self.elements:
            self._first_request = requested
        self.elements += 1
        self._waited += arrived - requested
        if message.kind is MessageKind.END:
            text = verdict(self._waited, arrived - self._first_request)
            log.python.debug("%d elements: %s", self.elements - 1, text)
        return message

    def _check_usable(self) -> None:
        if not self._stop.still_active():
            raise AssertionFailure(
                "The asynchronous loader has been terminated",
                fix=("create a new loader; call terminate() only when you need the loader no more"),
            )

    def _start_loading(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._send(MessageKind.START)

    def _release(self) -> None:
        if self._poisons:
            buffer_ring.poison(self._current)
        self._current = []

    def _restart(self) -> None:
        self._release()
        self._is_started = True
        self._send(MessageKind.RESTART, self._producers_iteration)
        answer = MessageKind.RESTARTED, self._producers_iteration
        while ((message := self._message()).kind, message.rows) != answer:
            if message.kind is MessageKind.GONE:
                self._last = message
                raise self._failed()

    def _send(self, kind: MessageKind, number: int = 0) -> None:
        # The process may be gone, but messages that it sent before must still be read.
        with contextlib.suppress(ConnectionError):
            self._process.channel.send(kind, rows=number)

    def _message(self) -> Message:
        receive = self._process.channel.receive
        try:
            while (message := receive(_CHECK_SECONDS)) is None:
                # Processes that the loading process forked may keep its end of the channel open.
                if self._process.exit_code is not None:
                    message = receive(0.0)
                    if message is None:
                        raise EOFError
                    break
        except EOFError:
            return Message(MessageKind.GONE, 0, 0, self._process.describe_end())
        return message

    def _failed(self) -> Error:
        assert self._last is not None
        return AssertionFailure(
            "An error occurred in the data fetcher",
            got=self._last.text,
            fix=(
                "correct the line of the data set at the end of this traceback; to debug it in "
                "this process, use DataLoaderMode.Sync"
            ),
        )

    def _announcement(self) -> tuple[buffer_ring.Form, list[Tensors]]:
        message = self._message()
        if message.kind is MessageKind.FAILED:
            log.python.error("The loading process could not start:\n%s", message.text)
        if message.kind is MessageKind.GONE:
            raise _not_started(message.text, _GUARD, _TRAVEL, _FORK)
        # the data set had arrived, so its traceback explains everything
        if message.kind is not MessageKind.READY:
            raise _not_started(message.text, *((_DATA_SET,) if message.slot else (_TRAVEL, _FORK)))
        try:
            file = self._process.channel.receive_file()
        except EOFError:
            raise _not_started(self._process.describe_end(), _SYNC) from None
        try:
            return buffer_ring.attach(file, message.rows)
        finally:
            os.close(file)


def _not_started(reason: str, *fix: str) -> Error:
    return Error("The asynchronous loader's worker thread failed to start", got=reason, fix=fix)


def verdict(waited: float, total: float) -> str:
    share = waited / total if total else 0.0
    spent = f"waiting for data took {waited:.2f} s of {total:.2f} s ({share:.0%})"
    if share < _NEGLIGIBLE:
        return f"{spent}. The device limits the run, not the host"
    return f"{spent}. The host limits the run: it would take {total - waited:.2f} s without waiting"
