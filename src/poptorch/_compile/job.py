"""Compiler processes as seen from the process that trains: started, asked, ended.

Nothing here waits and there is no thread: between two calls of the model the processes are asked
whether they have something to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._ir.graph import Graph
from . import serial, worker
from .code import Store

_CODE = "import sys; sys.path[:] = {path!r}; from {module} import main; main({request!r})"


class Job:
    """Graphs that are being compiled.

    Args:
        graphs: by key.
        backend: name of the builder.
        store: where the code will be.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, graphs: Mapping[str, Graph], backend: str, store: Store) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}  # by key: how it went, and why
        self._folder = tempfile.TemporaryDirectory(prefix="poptorch-compiling-")
        self._workers: list[_Worker] = []
        # Cleaned up when it is dropped, or when the interpreter ends; not by forked children.
        self._end = weakref.finalize(self, _end, self._workers, self._folder, os.getpid())
        parts = _shares(graphs, max(1, min(len(graphs), (os.cpu_count() or 2) - 1)))
        try:
            for at, part in enumerate(parts):
                file = Path(self._folder.name) / f"{at}.json"
                file.write_text(json.dumps(self._request(part, backend, store)))
                self._workers.append(_Worker(file, list(part)))
        except BaseException:
            self._end()
            raise

    @staticmethod
    def _request(graphs: Mapping[str, Graph], backend: str, store: Store) -> dict[str, Any]:
        return {
            "backend": backend,
            "store": str(store.folder),
            "threads": torch.get_num_threads(),
            "graphs": {key: serial.encode(graph) for key, graph in graphs.items()},
        }

    def finished(self) -> bool:
        """Look whether all graphs have an outcome; never waits."""
        for process in self._workers:
            self.outcomes |= process.look()
        return all(process.done for process in self._workers)

    def end(self) -> None:
        """End what is still running."""
        self._end()


class _Worker:
    def __init__(self, file: Path, keys: list[str]) -> None:
        self._keys = keys
        self._text = b""
        self.done = False
        self._errors = file.with_suffix(".log")
        code = _CODE.format(path=sys.path, module=worker.__name__, request=str(file))
        # A session of its own: Ctrl-C is for the process that trains, which decides what ends.
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def look(self) -> dict[str, tuple[str, str]]:
        """Return what has been said since the last time."""
        if self.done:
            return {}
        assert self.process.stdout is not None
        said = self.process.stdout.read()  # None: nothing yet; empty: the process has ended
        if said:
            self._text += said
        *lines, self._text = self._text.split(b"\n")
        outcomes = {}
        for line in lines:
            entry = json.loads(line)
            outcomes[entry["key"]] = entry["outcome"], entry["why"]
            self._keys.remove(entry["key"])
        if said == b"":
            self.done = True
            why = self._last_error() if self._keys else ""
            outcomes |= dict.fromkeys(self._keys, (worker.FAILED, why))
        return outcomes

    def _last_error(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        status = self.process.wait()
        return lines[-1] if lines else f"the compiler process ended with status {status}"

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with its C++ compiler
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


def _shares(graphs: Mapping[str, Graph], number: int) -> list[dict[str, Graph]]:
    shares: list[dict[str, Graph]] = [{} for _ in range(number)]
    largest = sorted(graphs, key=lambda key: len(graphs[key].module.graph.nodes), reverse=True)
    for at, key in enumerate(largest):
        shares[at % number][key] = graphs[key]
    return shares


def _end(workers: list[_Worker], folder: tempfile.TemporaryDirectory[str], owner: int) -> None:
    if os.getpid() != owner:
        return
    for process in workers:
        process.end()
    folder.cleanup()
