"""Signs of life: each process writes one every second, so that who waits can say for whom.

A process that is killed closes its connections, and who waits for it fails at once; but only the
neighbours in a ring notice that way, and a machine that vanishes closes nothing.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from .._base import log

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 4 * BEAT
"""After a connection broke: seconds without a sign of life until a process is to blame for it."""
IMPATIENT = 10.0
"""Seconds of waiting after which a line says for whom; then after twice as many, and so on."""


@dataclass(frozen=True)
class Loss:
    """A process that is gone.

    Attributes:
        index: which one.
        why: what is known about it.
    """

    index: int
    why: str


class Watch:
    """Writes this process's signs of life and reads the others'.

    Args:
        store: that all share; each process has a connection of its own for this.
        index, count: which process this is, of how many.
        patience: seconds without a sign of life after which a process counts as lost.

    Attributes:
        doing: how many exchanges this process has begun, and what the latest is of.
    """

    def __init__(self, store: Any, index: int, count: int, patience: float) -> None:
        self._store = store
        self._index = index
        self._others = [other for other in range(count) if other != index]
        self._patience = patience
        self.doing = (0, "")
        self._beats = 0
        self._last: dict[int, tuple[dict[str, Any], float]] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._beat()
        self._thread = threading.Thread(target=self._go_on, name="poptorch life", daemon=True)
        self._thread.start()

    def stop(self, why: str, cause: Loss | None) -> None:
        """Write the last sign: this process ends.

        Args:
            why: what the others will be told.
            cause: the process that is to blame, if it is another one.
        """
        self._end.set()
        of = None if cause is None else [cause.index, cause.why]
        self._write({"ended": why, "cause": of})

    def _go_on(self) -> None:
        while not self._end.wait(BEAT):
            if not self._beat():
                return  # the store is gone: whoever waits will find out

    def _beat(self) -> bool:
        self._beats += 1
        started, what = self.doing
        return self._write({"beat": self._beats, "started": started, "what": what})

    def _write(self, sign: dict[str, Any]) -> bool:
        try:
            with self._lock:
                self._store.set(f"life/{self._index}", json.dumps(sign))
        except RuntimeError as error:  # torch's network errors
            log.python.debug("Signs of life have nowhere to go: %s", error)
            return False
        return True

    def look(self) -> Loss | None:
        """Read the signs of all; return a process that has ended or is silent for too long."""
        now = time.monotonic()
        for other in self._others:
            sign = self._read(other)
            if sign is None:
                return Loss(0, "whoever keeps the job's store (process 0 or the launcher) is gone")
            if other not in self._last or self._last[other][0] != sign:
                self._last[other] = sign, now
            if "ended" in sign:
                cause = sign["cause"]
                return Loss(other, sign["ended"]) if cause is None else Loss(*cause)
            if sign["started"] == self.doing[0] and sign["what"] != self.doing[1]:
                return Loss(other, f"it does something else: it exchanges {sign['what']}")
        silent = self._silent(now, self._patience)
        if silent:
            return Loss(silent[0], f"no sign of life for {self._patience:.0f} s")
        return None

    def blame(self) -> Loss | None:
        """A connection broke: return the process that ended, or gives no sign of life from now on.

        None if all of them are alive: it was the network.
        """
        began = time.monotonic()
        self._last.clear()
        while True:
            loss = self.look()
            if loss is not None:
                return loss
            now = time.monotonic()
            silent = self._silent(now, SILENT)
            if silent:
                return Loss(silent[0], "it was killed, or its machine is gone")
            if now - began > 2 * SILENT:
                return None
            time.sleep(BEAT / 4)

    def slow(self) -> list[int]:
        """Return the processes that have not begun what this one waits for, by the last look."""
        return [i for i, (sign, _) in self._last.items() if sign.get("started", 0) < self.doing[0]]

    def _silent(self, now: float, limit: float) -> list[int]:
        return [index for index, (_, since) in self._last.items() if now - since > limit]

    def _read(self, other: int) -> dict[str, Any] | None:
        try:
            with self._lock:
                sign: dict[str, Any] = json.loads(self._store.get(f"life/{other}"))
        except RuntimeError as error:
            log.python.debug("Signs of life cannot be read: %s", error)
            return None
        return sign
