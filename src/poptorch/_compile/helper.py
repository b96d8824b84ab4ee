"""Compiler processes as seen from the process that trains: started, asked, kept for the next time.

Nothing here waits unless it is asked to, and there is no thread: between two calls of the model the
processes are asked whether they have something to say. One that has nothing to do is kept: the next
program need not wait until another has imported torch's compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._base import env
from . import worker

# Garbage is looked for among a million new objects, not among 700: importing and lowering make
# millions that stay. Processor time of the process for the tutorial's CNN, without the C++
# compiler's: 6.3 to 6.8 s instead of 7.9 to 8.1; a ResNet-18 takes 145 MB more.
COLLECTING = 1_000_000
"""New objects before a process that compiles looks for garbage."""
_CODE = (
    "import gc, sys; gc.set_threshold({collecting}); sys.path[:] = {path!r}; "
    "from {module} import main; main({backend!r})"
)
Outcome = tuple[str, str]  # how it went, and why


class Helper:
    """One compiler process.

    Args:
        backend: name of the builder.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, backend: str) -> None:
        self.kind = kind(backend)
        self.owner = os.getpid()
        self._asked: dict[str, Path] = {}  # keys that have no outcome yet, with their request
        self._text = b""
        self._imported = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        # A session of its own: Ctrl-C is for the process that trains, which decides what ends.
        try:
            self.process = subprocess.Popen(
                self.kind[0],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def ask(self, request: dict[str, Any]) -> None:
        """Let it compile; ``request`` is what ``worker`` reads.

        Raises:
            OSError: the request cannot be written.
        """
        with tempfile.NamedTemporaryFile(
            "w", prefix="poptorch-compiling-", suffix=".json", delete=False
        ) as file:
            self._asked = dict.fromkeys(request["graphs"], Path(file.name))
            json.dump(request, file)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``look`` finds out why
            self.process.stdin.write(f"{file.name}\n".encode())
            self.process.stdin.flush()

    @property
    def busy(self) -> bool:
        """Whether something that was asked for has no outcome."""
        return bool(self._asked)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    @property
    def has_imported(self) -> bool:
        """Whether it has imported the compiler; never waits."""
        self.look()
        return self._imported

    def look(self) -> dict[str, Outcome]:
        """Return what has been said since the last time; never waits."""
        assert self.process.stdout is not None
        said = self.process.stdout.read()  # None: nothing yet; empty: the process has ended
        self._text += said or b""
        *lines, self._text = self._text.split(b"\n")
        outcomes: dict[str, Outcome] = {}
        for line in lines:
            entry = json.loads(line)
            self._imported = True
            if entry:
                outcomes[entry["key"]] = entry["outcome"], entry["why"]
                del self._asked[entry["key"]]
        if said == b"" and self.busy:
            outcomes |= dict.fromkeys(self._asked, (worker.FAILED, self._last_error()))
            self._forget()
        return outcomes

    def _last_error(self) -> str:
        status = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the compiler process ended with status {status}"

    def _forget(self) -> None:
        for path in {*self._asked.values()}:
            path.unlink(missing_ok=True)
        self._asked = {}

    def end(self) -> None:
        """End it, with its C++ compiler."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()
        self._forget()


def kind(backend: str) -> tuple[tuple[str, ...], frozenset[tuple[str, str]]]:
    """Return the command that starts a process, and the environment: with others it is another."""
    code = _CODE.format(
        path=sys.path, module=worker.__name__, backend=backend, collecting=COLLECTING
    )
    return (sys.executable, "-W", "ignore", "-c", code), env.inherited()


def wait(helpers: Sequence[Helper]) -> None:
    """Wait until one of the processes has something to say."""
    streams: list[Any] = [helper.process.stdout for helper in helpers if helper.busy]
    select.select(streams, [], [])


_kept: list[Helper] = []  # one at most


def take(backend: str) -> Helper:
    """Return a process that has nothing to do: the one that was kept, or a new one.

    Raises:
        OSError: no process can be started.
    """
    for helper in _kept[:]:
        if helper.owner != os.getpid():
            continue
        _kept.remove(helper)
        if helper.alive and helper.kind == kind(backend):
            return helper
        helper.end()
    return Helper(backend)


def is_there(backend: str, imported: bool = False) -> bool:
    """Tell whether a process is kept that would be taken.

    Args:
        backend: name of the builder.
        imported: it has to have imported the compiler, too.
    """
    return any(
        helper.owner == os.getpid()
        and helper.alive
        and helper.kind == kind(backend)
        and (helper.has_imported or not imported)
        for helper in _kept
    )


def warm(backend: str) -> None:
    """Have a process that imports the compiler meanwhile.

    Raises:
        OSError: no process can be started.
    """
    give_back([take(backend)])


def give_back(helpers: Iterable[Helper]) -> None:
    """Keep one process for the next program, end the others; forked children leave all alone."""
    for helper in helpers:
        if helper.owner != os.getpid():
            continue
        if helper.alive and not helper.busy and not _kept:
            _kept.append(helper)
        else:
            helper.end()


@atexit.register
def end_kept() -> None:
    """End the process that is kept."""
    for helper in _kept:
        if helper.owner == os.getpid():
            helper.end()
    _kept.clear()
