"""Compiling in a process beside the one that trains.

The process is given the name of a file with the graphs, writes what it compiled into the store and
says so, a line of JSON per graph. Its standard input is its life line: when the process that
started it closes it, or ends in any way, this one and its C++ compilers end too.
"""

from __future__ import annotations

import json
import os
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

NICE = 5  # the steps that run meanwhile go first

STORED, HERE, FAILED = "stored", "here", "failed"


def main(request: str) -> None:
    """Compile what a file asks for."""
    threading.Thread(target=_live_as_long_as_stdin, daemon=True).start()
    os.nice(NICE)
    asked = json.loads(Path(request).read_text())
    torch.set_num_threads(asked["threads"])
    builder: Any = backends.available()[asked["backend"]]
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


def _live_as_long_as_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written
    os.killpg(os.getpgrp(), signal.SIGKILL)
