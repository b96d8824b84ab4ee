"""Manage compiler processes and their priority. They get graphs over a socket, and return code
through the cache folder.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import backends
from .._base import env, log, timing
from .._base.errors import described
from .._base.json_codec import Unreadable
from .._base.resources import COLLECTING
from .._capture import trace
from .._ir import graph_json
from .._ir.graph import Graph
from .._ir.symbolic import example_sizes, is_symbolic, propagate
from . import registry
from .cache import Store

PATIENCE = 300.0  # seconds after which an idle process ends
LOW = 10  # the niceness of a process that compiles although no core is free
_CODE = (
    "import gc, sys; gc.set_threshold({collecting}); sys.path[:] = {path!r}; "
    "from {module} import main; main({backend!r}, int(sys.argv[1]))"
)
STORED, HERE, FAILED = "stored", "here", "failed"
JobOutcome = tuple[str, str]  # one of these results, and the reason


class CompilerProcess:
    """A process that imports the compiler before the first request.

    A request on its socket is the handle of an unnamed file with graphs. Answers are lines of JSON:
    the first one when the compiler is imported, then one per graph. When the training process ends,
    the socket closes, and this process and its C++ compilers end, too.
    """

    def __init__(self, backend: str) -> None:
        self.command = command(backend)
        self.owner = os.getpid()
        self._waiting_for: set[str] = set()  # keys that have no outcome yet
        self._text = b""
        self.imported = self.is_nice = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        # A separate session, because Ctrl-C is for the training process, which decides what to end.
        try:
            self.process = subprocess.Popen(
                [*self.command[0], str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            self.socket.close()
            raise
        finally:
            theirs.close()

    def submit(self, graphs: Mapping[str, Graph], store: Store) -> None:
        request = {
            "store": str(store.folder),
            "threads": torch.get_num_threads(),
            "graphs": {key: graph_json.encode(graph) for key, graph in graphs.items()},
        }
        with tempfile.TemporaryFile("w+") as file:
            json.dump(request, file)
            file.seek(0)
            self._waiting_for = {*graphs}
            with contextlib.suppress(ConnectionError):  # it has ended; ``poll`` finds out why
                socket.send_fds(self.socket, [b" "], [file.fileno()])

    @property
    def busy(self) -> bool:
        return bool(self._waiting_for)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def poll(self) -> dict[str, JobOutcome]:
        """Return the answers since the last call, without waiting."""
        ended = False
        with contextlib.suppress(BlockingIOError):  # no more answers yet
            while not ended:
                try:
                    received = self.socket.recv(1 << 16)
                except ConnectionError:
                    received = b""
                self._text += received
                ended = not received
        *lines, self._text = self._text.split(b"\n")
        outcomes: dict[str, JobOutcome] = {}
        for line in lines:
            outcomes |= {key: (outcome, why) for key, (outcome, why) in json.loads(line).items()}
            self.imported = True
        self._waiting_for -= outcomes.keys()
        if ended and self.busy:
            outcomes |= dict.fromkeys(self._waiting_for, (FAILED, self._exit_message()))
            self._waiting_for = set()
        for outcome, why in outcomes.values():
            if outcome == STORED:
                timing.log_times(self.process.pid, why)
            else:
                log.engine.info("A graph could not be compiled in the compiler process: %s", why)
        return outcomes

    def _exit_message(self) -> str:
        status = self.process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        log.engine.debug("The compiler process %d printed: %s", self.process.pid, text)
        last = f": {text.splitlines()[-1]}" if text else ""
        return f"the compiler process ended with status {status}{last}"

    def be_nice(self) -> None:
        """Increase the niceness of the process from now on. This cannot be undone."""
        self.is_nice = True
        with contextlib.suppress(OSError):  # it has just ended, or the system does not allow it
            os.setpriority(os.PRIO_PGRP, self.process.pid, LOW)

    def end(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        self._log.close()
        self.process.wait()
        self._waiting_for = set()


def command(backend: str) -> tuple[tuple[str, ...], frozenset[tuple[str, str]]]:
    code = _CODE.format(path=sys.path, module=__name__, backend=backend, collecting=COLLECTING)
    return (sys.executable, "-W", "ignore", "-c", code), env.inherited()


_kept: list[CompilerProcess] = []  # at most one


def acquire(backend: str) -> CompilerProcess:
    for process in _kept[:]:
        if process.owner != os.getpid():
            continue
        _kept.remove(process)
        if process.alive and process.command == command(backend):
            return process
        process.end()
    return CompilerProcess(backend)


def is_running(backend: str, imported: bool = False) -> bool:
    for process in _kept:
        mine = process.owner == os.getpid() and process.alive
        if mine and process.command == command(backend):
            process.poll()
            return process.imported or not imported
    return False


def warm(backend: str) -> None:
    release([acquire(backend)])


def release(processes: Iterable[CompilerProcess]) -> None:
    """Keep one process for the next program, and end the others. Forked children do nothing."""
    for process in processes:
        if process.owner != os.getpid():
            continue
        if process.alive and not process.busy and not process.is_nice and not _kept:
            _kept.append(process)
        else:
            process.end()


@atexit.register
def end_kept() -> None:
    for process in _kept:
        if process.owner == os.getpid():
            process.end()
    _kept.clear()


class CompileJob:
    def __init__(
        self,
        graphs: Mapping[str, Graph],
        backend: str,
        store: Store,
        processes: int,
        is_nice: bool = False,
    ) -> None:
        self.outcomes: dict[str, JobOutcome] = {}
        self.processes: list[CompilerProcess] = []
        # The processes are given back when this object is deleted, or when the interpreter ends.
        self.end = weakref.finalize(self, release, self.processes)
        keys = self.keys = list(graphs)
        number = min(len(keys), processes)
        try:
            for at in range(number):
                self.processes.append(acquire(backend))
                if is_nice:
                    self.processes[-1].be_nice()
                self.processes[-1].submit({key: graphs[key] for key in keys[at::number]}, store)
        except BaseException:
            self.end()
            raise

    def poll(self) -> bool:
        before = len(self.outcomes)
        for process in self.processes:
            self.outcomes |= process.poll()
        return len(self.outcomes) > before

    @property
    def finished(self) -> bool:
        return not any(process.busy for process in self.processes)

    def wait(self) -> None:
        while not self.finished:
            select.select([process.socket for process in self.processes if process.busy], [], [])
            self.poll()


# In the compiler process.


def main(backend: str, handle: int) -> None:
    """Compile what is requested, until there was no request for a while.

    It is not nice unless no core is ever free. With threads that wait actively on one of two cores,
    a nice process took 45 s or more for the tutorial's CNN, and this one 30 s. Calls are slower by
    a third in the meantime.
    """
    channel, requests = socket.socket(fileno=handle), queue.SimpleQueue[int]()
    threading.Thread(target=_receive, args=(channel, requests), daemon=True).start()
    builder: Any = registry.available()[backend]
    with contextlib.suppress(Exception):  # building then fails in the same way, which is the answer
        builder.warm()
    _answer(channel, {})
    # these objects stay, and the first garbage collection (0.4 of 4 s) is postponed to the next
    # program
    gc.freeze()
    while True:
        try:
            file = os.fdopen(requests.get(timeout=PATIENCE))
        except queue.Empty:
            return
        with file:
            request = json.load(file)
        torch.set_num_threads(request["threads"])
        for key, graph in request["graphs"].items():
            _answer(channel, {key: compiled(key, graph, builder, Store(Path(request["store"])))})


def _answer(channel: socket.socket, outcomes: dict[str, JobOutcome]) -> None:
    channel.sendall(json.dumps(outcomes).encode() + b"\n")


def compiled(key: str, graph: Any, builder: backends.Builder, store: Store) -> JobOutcome:
    try:
        with timing.measured() as spent:
            code = store.build(key, decoded(graph), builder)
    except Unreadable as error:  # the user's process has operators that do not exist here
        return HERE, str(error)
    except Exception as error:
        return FAILED, described(error)
    kept = code is None or code.kept is not None
    return (STORED, spent.text()) if kept else (HERE, "its compiled code cannot be stored")


def decoded(data: Any) -> Graph:
    graph = graph_json.decode(data)
    if is_symbolic(graph):
        propagate(graph.module, graph.inputs, example_sizes(graph.inputs))
    else:
        trace.fill_in_values(graph.module, [(slot.shape, slot.dtype) for slot in graph.inputs])
    return graph


def _receive(channel: socket.socket, requests: queue.SimpleQueue[int]) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            received, handles, *_ = socket.recv_fds(channel, 1, 1)
            if not received:
                break
            requests.put(handles[0])
    os.killpg(os.getpgrp(), signal.SIGKILL)
