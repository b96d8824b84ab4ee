"""Compiling in a process beside the one that trains.

The process imports the compiler before anybody asks for anything. A line on its standard input
names a file with graphs; it removes the file, writes what it compiled into the store and says so, a
line of JSON per graph; a first line says that the compiler is imported. The input is its life line,
too: when the process that started it closes it, or ends in any way, this one and its C++ compilers
end. It also ends when nobody asks for long.

It is not nice. On two cores, one of them kept by threads that wait at work for the next parallel
operator, a nice process (5) had compiled the tutorial's CNN after 45 s or more, this one after 30:
calls are slower meanwhile, by a third, and then two to four times as fast.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from .. import backends
from .._base.errors import described
from . import serial
from .code import Store

PATIENCE = 300.0  # seconds that a process with nothing to do stays

STORED, HERE, FAILED = "stored", "here", "failed"


def main(backend: str) -> None:
    """Compile what the lines of the standard input ask for.

    Args:
        backend: name of the builder.
    """
    requests = queue.SimpleQueue[str]()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    builder: Any = backends.available()[backend]
    with contextlib.suppress(Exception):  # building fails in the same way, and that is said
        builder.warm()
    print(json.dumps({}), flush=True)
    gc.freeze()  # all of it stays: the first look for garbage, 0.4 s of 4, comes a program later
    while True:
        try:
            request = Path(requests.get(timeout=PATIENCE))
        except queue.Empty:
            return
        asked = json.loads(request.read_text())
        request.unlink()
        _serve(asked, builder)


def _serve(asked: Any, builder: backends.Builder) -> None:
    torch.set_num_threads(asked["threads"])
    store = Store(Path(asked["store"]))
    for key, graph in asked["graphs"].items():
        outcome, why = _compile(key, graph, builder, store)
        print(json.dumps({"key": key, "outcome": outcome, "why": why}), flush=True)


def _compile(key: str, graph: Any, builder: backends.Builder, store: Store) -> tuple[str, str]:
    """Return how it went: in the store, only possible in the user's process, or not possible."""
    try:
        code = store.build(key, serial.decode(graph), builder)
    except serial.Unreadable as error:  # the user's process has operators that this one has not
        return HERE, str(error)
    except Exception as error:
        return FAILED, described(error)
    kept = code is None or code.kept is not None
    return (STORED, "") if kept else (HERE, "its code cannot be kept")


def _read(requests: queue.SimpleQueue[str]) -> None:
    asked = []
    for line in sys.stdin:
        asked.append(line.rstrip("\n"))
        requests.put(asked[-1])
    for path in asked:  # who wrote them may have been killed
        Path(path).unlink(missing_ok=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
