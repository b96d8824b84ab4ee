"""Starting and ending the loading process: the four ways it can come into being, and one way out.

Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

from .._base import log, trees
from .._base.processes import is_running
from ..enums import SharingStrategy
from . import segments, worker
from .pickling import Pickled
from .protocol import Channel, Kind

PATIENCE = 10.0  # seconds between the steps of ending a process: ask, interrupt, kill

_SERVER_GONE = 255  # Python's exit code of a process whose fork server can no longer tell it

_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class Handle:
    """A file descriptor that a new process gets too, whichever way it is started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _opened, (reduction.DupFd(self._descriptor),)

    def detach(self) -> int:
        """Return the descriptor."""
        return self._descriptor


def _opened(duplicate: Any) -> Handle:
    return Handle(duplicate.detach())


class _Inherited:
    """Like ``Pickled``, for a process that has everything in its memory already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def load(self) -> Any:
        return self._value

    def discard(self) -> None:
        self._value = None


class Process:
    """A running worker with the channel to it; ``stop`` leaves nothing of it behind."""

    def __init__(
        self, source: Any, descriptor: int, strategy: SharingStrategy, settings: worker.Settings
    ) -> None:
        context = multiprocessing.get_context(_METHODS[strategy])
        forks = strategy is SharingStrategy.Fork
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        if forks:
            self._pickled: Any = _Inherited((source, trees.registered()))
        else:
            with_parsers = (source, _picklable_parsers())
            self._pickled = Pickled(with_parsers, strategy is SharingStrategy.FileSystem)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=worker.main,
            args=(
                theirs,
                ours if forks else None,
                Handle(descriptor),
                self._pickled,
                settings,
                "fork" if forks else multiprocessing.get_start_method(allow_none=True),
            ),
            name="poptorch-data",
        )
        try:
            with theirs, _prepared(strategy):
                self._process.start()
        except BaseException:
            self._pickled.discard()
            self.channel.close()
            raise

    def started(self) -> None:
        """Forget what was only there to start the process: it has reported."""
        self._pickled.discard()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal killed it."""
        code: int | None = self._process.exitcode
        if code == _SERVER_GONE and is_running(self._process.pid):
            return None
        return code

    def describe_end(self) -> str:
        """Return how the process ended, for messages."""
        self._process.join(PATIENCE)  # its connection may end a moment before itself
        code = self._process.exitcode
        if code is None:
            return "the loading process closed its connection"
        if code < 0:
            name = signal.Signals(-code).name
            return f"the loading process was killed by {name}"
        return f"the loading process ended with exit code {code}"

    def stop(self) -> None:
        """Ask the process to end, after 10 s interrupt it, after another 10 s kill it."""
        process, group = self._process, self._process.pid
        members = segments.members(group)
        with contextlib.suppress(OSError):
            self.channel.send(Kind.STOP)
        self.channel.close()
        process.join(PATIENCE)
        if process.exitcode is None:
            log.python.warning("The loading process does not stop; interrupting it")
            _signal(os.kill, group, signal.SIGINT)
            process.join(PATIENCE)
        members, patience = members | segments.members(group), 1.0
        if process.exitcode != 0:
            # Its own workers too: they are of its group, and nobody else would end them at once.
            _signal(os.killpg, group, signal.SIGKILL)
            process.kill()
            process.join()
            patience = PATIENCE  # a killed process is not gone at once
        process.close()
        segments.remove(members, patience)
        self._pickled.discard()


def _signal(send_signal: Any, target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send_signal(target, number)


def _picklable_parsers() -> dict[type, trees.Parser]:
    """Return the registered parsers that another process can have: not those of local classes."""
    parsers = {}
    for kind, parser in trees.registered().items():
        try:
            pickle.dumps((kind, parser))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            log.python.debug("No parser for %s in the loading process: %s", kind, error)
        else:
            parsers[kind] = parser
    return parsers


@contextlib.contextmanager
def _prepared(strategy: SharingStrategy) -> Iterator[None]:
    """Start a process such that Ctrl-C during its start-up does not make it print a traceback."""
    if strategy is SharingStrategy.ForkServer:
        worker.preload()
        yield
        return
    # The new process inherits the mask and lifts it when it is ready for interrupts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
