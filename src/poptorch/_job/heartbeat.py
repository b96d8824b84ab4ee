"""Find out which process has died or hangs after the processes have met: each writes a heartbeat
every second.

A killed process closes its connections, but only neighbours in a ring notice, and a machine that
disappears closes nothing. Heartbeats go through the store in which the processes met. The store
ends with its owner. Therefore a thread reads all heartbeats, each process remembers the owner's
last one, and the owner leaves last.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, NamedTuple

from .._base import log
from .._base.errors import Error

INTERVAL = 1.0  # seconds between two heartbeats
# a process without a heartbeat for this time is blamed for a broken connection
SILENT = 4 * INTERVAL

Beat = dict[str, Any]


class LostProcess(NamedTuple):
    process: int  # -1 for something that is not a process of the job
    why: str


class Heartbeat:
    """Writes this process's heartbeats, and reads those of other processes, in a thread.

    ``owner`` is the process that owns the store, or -1 if an agent owns it.
    """

    def __init__(self, store: Any, index: int, count: int, patience: float, owner: int) -> None:
        self._store = store
        self._index = index
        self._others = [other for other in range(count) if other != index]
        self._patience = patience
        self._owner = owner
        # number of exchanges that this process has started, and the description of the latest
        self.doing = (0, "")
        self.done = 0  # number of exchanges that it has finished
        self._count = 0
        self._last: Beat | None = None  # set after the message that this process ends
        self._met = self._answered = self._waiting_since = time.monotonic()
        # the heartbeats of the other processes, and the times since which they are unchanged
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._all_there = False
        self._lost_because = ""  # why the store cannot be reached any more
        self._over = False
        self._wake, self._last_was_sent = threading.Event(), threading.Event()
        # A daemon thread, because a store on a machine that hangs would block it forever.
        self._thread = threading.Thread(target=self._run, name="poptorch heartbeat", daemon=True)
        self._thread.start()

    # The work of the thread. Other threads must not do it, because a store on a machine that hangs
    # does not answer.

    def _run(self) -> None:
        try:
            self._store = self._store.clone()
            while not self._over:
                self._wake.clear()
                self._read()
                last, beat = self._last, self._next()
                self._store.set(f"heartbeat/{self._index}", json.dumps(beat))
                self._answered = time.monotonic()
                if last is not None and last is self._last:
                    self._last_was_sent.set()
                self._wake.wait(INTERVAL)
        except RuntimeError as error:  # torch's network errors
            log.python.debug("Heartbeats cannot be sent: %s", error)
            ours = isinstance(error, Error)
            self._lost_because = error.args[0] if ours else "the connection to it is closed"
            self._last_was_sent.set()

    def _next(self) -> Beat:
        self._count += 1
        (started, what), done = self.doing, self.done
        leaving = "ended" in self._beat_of(self._owner)
        beat = {"started": started, "what": what, "done": done, "leaving": leaving}
        return beat | (self._last or {"beat": self._count})

    def _read(self) -> None:
        keys = [f"heartbeat/{other}" for other in self._others]
        if not self._all_there:  # reading would wait for one that has not been written
            keys = [key for key in keys if self._store.check([key])]
            self._all_there = len(keys) == len(self._others)
        now = time.monotonic()
        for key, text in zip(keys, self._store.multi_get(keys), strict=True):
            other, beat = int(key.rpartition("/")[2]), json.loads(text)
            if self._beat_of(other) != beat:
                self._beats[other] = beat, now

    def _beat_of(self, other: int) -> Beat:
        return self._beats[other][0] if other in self._beats else {}

    def begin(self, what: str) -> None:
        """Start an exchange. The next one may start when ``done`` has been increased."""
        self.doing = (self.doing[0] + 1, what)
        self._waiting_since = time.monotonic()

    def stop(self, why: str, cause: LostProcess | None) -> None:
        self._last_was_sent.clear()
        self._last = {"ended": why, "cause": cause}
        self._wake.set()
        if not self._lost_because:
            self._last_was_sent.wait(SILENT)

    def end(self) -> None:
        """End the thread. At exit, Python would abort the process if the thread is inside torch's
        code.
        """
        self._over = True
        self._wake.set()
        self._thread.join(SILENT)

    def wait_for_others(self) -> None:
        """Wait until others have finished with the store, which ends with this process."""
        began = time.monotonic()
        end = began + 2 * SILENT
        while self._index == self._owner and not self._lost_because and time.monotonic() < end:
            waiting = {other for other in self._others if not self._has_noticed(other)}
            if waiting.issubset(self._silent(SILENT, began)):
                break
            self._wake.set()
            time.sleep(INTERVAL / 20)

    def _has_noticed(self, other: int) -> bool:
        beat = self._beat_of(other)
        knows = beat.get("leaving", False) and beat["done"] >= self.done
        cause = self._last and self._last["cause"]
        return knows or "ended" in beat or bool(cause and cause[0] == other)

    def find_loss(self) -> LostProcess | None:
        for other in self._others:
            beat = self._beat_of(other)
            if beat.get("started") == self.doing[0] and beat["what"] != self.doing[1]:
                why = f"it is at another point of the program: it exchanges {beat['what']}"
                return LostProcess(other, why)
            without = bool(self._lost_because) and other == self._owner
            has_left = beat.get("done", 0) < self.doing[0] or without
            if "ended" in beat and has_left:
                cause = beat["cause"]
                return LostProcess(other, beat["ended"]) if cause is None else LostProcess(*cause)
        if self._lost_because:
            return self._without_store(self._lost_because)
        no_sign = f"no sign of life for {self._patience:.0f} s"
        answered = max(self._answered, self._waiting_since)
        if time.monotonic() - answered > self._patience:
            return self._without_store(no_sign)
        silent = self._silent(self._patience, self._met)
        return LostProcess(silent[0], no_sign) if silent else None

    def blame(self) -> LostProcess | None:
        """Return which process ended or is silent after a connection broke; None if it was the
        network.
        """
        began = time.monotonic()
        while time.monotonic() - began < 2 * SILENT:
            self._wake.set()
            time.sleep(INTERVAL / 20)
            loss = self.find_loss()
            if loss is not None:
                return loss
            silent = self._silent(SILENT, began)
            if silent:
                return LostProcess(silent[0], "it was killed, or its machine is lost")
        return None

    def slow(self) -> list[int]:
        return [i for i in self._others if self._beat_of(i).get("started", 0) < self.doing[0]]

    def _silent(self, limit: float, began: float) -> list[int]:
        late = self._answered - limit
        since = {other: self._beats.get(other, ({}, began))[1] for other in self._others}
        return [other for other in self._others if max(since[other], began) < late]

    def _without_store(self, why: str) -> LostProcess:
        kept = "stored the messages of the processes"
        if self._owner < 0:
            return LostProcess(-1, f"the launcher's agent {kept}, and {why}")
        return LostProcess(self._owner, f"it {kept}, and {why}")
