"""One of three processes; the one with the store ends first. ``main`` prints a message."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import poptorch
from helpers.patience import eventually
from poptorch import _job
from poptorch._job import heartbeat


class Slow:
    """A store from which a text comes late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        time.sleep(0.1)
        value: bytes = self._store.get(key)
        return value


def has_ended(store: Any) -> bool:
    try:
        store.check(["anything"])
    except RuntimeError:
        return True
    return False


def main(what: str) -> int:
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat.INTERVAL, heartbeat.SILENT = 0.2, 0.8
    group = _job.join(index, count, 3.0)
    group.texts("first", "first texts")
    Path(f"ready{index}").touch()
    assert eventually(lambda: all(Path(f"ready{other}").exists() for other in range(count)))
    ends, how = {
        "another is killed": (1, signal.SIGKILL),
        "it is killed": (0, signal.SIGKILL),
        "it is stopped": (0, signal.SIGSTOP),
        "a member is killed": (0, signal.SIGKILL),
        "a member is stopped": (0, signal.SIGSTOP),
        "it is done": (None, None),
    }[what]
    if index == ends and how is not None:
        os.kill(os.getpid(), how)
    if what == "it is done" and index == 2:
        group._store = Slow(group._store)
    if what in ("another is killed", "it is killed") and index == 2:
        assert eventually(lambda: has_ended(group._store))
    try:
        print(len(group.texts("second", "second texts")), "texts")
    except poptorch.Error as error:
        print(error)
        return 1
    return 0
