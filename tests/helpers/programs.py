"""Python programs as a user would start them: forks of a process that has imported torch only.

Who counts imports, or needs another number of threads from the start, starts Python itself.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers import compiled, program_server
from helpers.patience import HANGS
from helpers.source_tree import PACKAGE


class Program:
    """A program that runs; the part of ``subprocess.Popen`` that tests use.

    It gets the words behind ``python``, this process's environment with our packages unless it is
    given one, and a session of its own if wanted; ``stdout`` is a descriptor in a pipe's place.
    """

    def __init__(
        self,
        *words: Any,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        session: bool = False,
        stdout: Any = None,
    ) -> None:
        request = {
            "words": [str(word) for word in words],
            "environment": dict(with_ours() if environment is None else environment),
            "folder": str(folder or Path.cwd()),
            "session": session,
        }
        their_stdin, stdin = os.pipe()
        out, their_out = os.pipe()
        status, their_status = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe could be full)
        theirs = [
            their_stdin,
            their_out if stdout is None else stdout,
            self._errors.fileno(),
            their_status,
        ]
        socket.send_fds(_server(), [json.dumps(request).encode()], theirs)
        for file in (their_stdin, their_out, their_status):
            os.close(file)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(out)
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return the exit status, negative for a signal, when it has ended."""
        if self.returncode is None:
            self.returncode = int(self._status.readline())
        return self.returncode

    def errors(self) -> str:
        file = self._errors.fileno()  # whose position is the program's
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def communicate(self) -> tuple[str, str]:
        """Let it run to its end; return what it printed and its errors."""
        self.stdin.close()
        out = self.stdout.read()
        self.wait()
        return out, self.errors()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        compiled.note_failures_in(self.errors())
        for file in (self.stdin, self.stdout, self._status, self._errors):
            file.close()


def run(*words: object, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; arguments are those of ``Program``."""
    program = Program(*words, **settings)  # type: ignore[arg-type]
    try:
        out, errors = program.communicate()
        return subprocess.CompletedProcess(words, program.wait(), out, errors)
    finally:
        program.close()


def with_ours(**more: str) -> dict[str, str]:
    """Return this process's environment, in which our packages can be imported."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **more}


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, program_server.__file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()

    @atexit.register
    def end(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:  # and not a process that a test forked
            ours.close()
            process.wait(HANGS)

    return ours
