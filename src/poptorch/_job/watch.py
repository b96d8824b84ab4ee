"""Signs of life: each process writes one every second, so that who waits can say for whom.

A process that is killed closes its connections, and who waits for it fails at once; but only the
neighbours in a ring notice that way, and a machine that vanishes closes nothing.

The signs go through the store in which the processes met. One of them may keep it, and takes it
along when it ends; so a thread reads everything, each process remembers the last sign of that one,
and that one leaves last.
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
_SOON = BEAT / 20

Sign = dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """A process that is gone.

    Attributes:
        index: which one; -1 for what is no process of the job.
        why: what is known about it.
    """

    index: int
    why: str


class Watch:
    """Writes this process's signs of life and reads the others', in a thread of its own.

    Args:
        store: that all share; this is to have a connection of its own to it.
        index, count: which process this is, of how many.
        patience: seconds without a sign of life after which a process counts as lost.
        keeper: the process with which the store ends; -1 for a launcher's agent.

    Attributes:
        doing: how many exchanges this process has begun, and what the latest is of.
        done: how many of them it has finished.
    """

    def __init__(self, store: Any, index: int, count: int, patience: float, keeper: int) -> None:
        self._store = store
        self._index = index
        self._others = [other for other in range(count) if other != index]
        self._patience = patience
        self._keeper = keeper
        self.doing = (0, "")
        self.done = 0
        self._beats = 0
        self._last: Sign | None = None  # once it has been told that this process ends
        self._met = self._answered = self._waiting_since = time.monotonic()
        self._signs: dict[int, tuple[Sign, float]] = {}  # of the others, and since when
        self._all_there = False
        self._gone = False  # the store
        self._wake, self._told = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="poptorch life", daemon=True)
        self._thread.start()

    # What the thread does. Whoever waits must not: a store whose machine hangs does not answer.

    def _go_on(self) -> None:
        try:
            self._store = self._store.clone()
            while True:
                self._wake.clear()
                self._read()
                last, sign = self._last, self._sign()
                self._store.set(_key(self._index), json.dumps(sign))
                self._answered = time.monotonic()
                if last is not None and last is self._last:
                    self._told.set()
                self._wake.wait(BEAT)
        except RuntimeError as error:  # torch's network errors
            log.python.debug("Signs of life have nowhere to go: %s", error)
            self._gone = True
            self._told.set()

    def _sign(self) -> Sign:
        self._beats += 1
        (started, what), done = self.doing, self.done
        parting = "ended" in self._sign_of(self._keeper)
        sign = {"started": started, "what": what, "done": done, "parting": parting}
        return sign | (self._last or {"beat": self._beats})

    def _read(self) -> None:
        keys = [_key(other) for other in self._others]
        if not self._all_there:  # reading would wait for one that has not been written
            keys = [key for key in keys if self._store.check([key])]
            self._all_there = len(keys) == len(self._others)
        now = time.monotonic()
        for key, text in zip(keys, self._store.multi_get(keys), strict=True):
            other, sign = int(key.rpartition("/")[2]), json.loads(text)
            if self._sign_of(other) != sign:
                self._signs[other] = sign, now

    def _sign_of(self, other: int) -> Sign:
        return self._signs[other][0] if other in self._signs else {}

    # What its owner does.

    def begin(self, what: str) -> None:
        """An exchange begins; the next one does when ``done`` has been raised."""
        self.doing = (self.doing[0] + 1, what)
        self._waiting_since = time.monotonic()

    def stop(self, why: str, cause: Loss | None) -> None:
        """Write the last sign: this process ends.

        Args:
            why: what the others will be told.
            cause: the process that is to blame, if it is another one.
        """
        of = None if cause is None else [cause.index, cause.why]
        self._told.clear()
        self._last = {"ended": why, "cause": of}
        self._wake.set()
        if not self._gone:
            self._told.wait(SILENT)

    def see_off(self) -> None:
        """Before the store ends with this process: wait until the others know that, or have ended.

        Those that are in an exchange that this one has finished come to its end first. Who is
        silent is not waited for.
        """
        began = time.monotonic()
        end = began + 2 * SILENT
        while self._index == self._keeper and not self._gone and time.monotonic() < end:
            waiting = {other for other in self._others if not self._is_seen_off(other)}
            if waiting.issubset(self._silent(SILENT, began)):
                break
            self._wake.set()
            time.sleep(_SOON)

    def _is_seen_off(self, other: int) -> bool:
        sign = self._sign_of(other)
        knows = sign.get("parting", False) and sign["done"] >= self.done
        cause = self._last and self._last["cause"]
        return knows or "ended" in sign or bool(cause and cause[0] == other)

    def look(self) -> Loss | None:
        """Return a process that has ended or is silent for too long."""
        for other in self._others:
            sign = self._sign_of(other)
            if sign.get("started") == self.doing[0] and sign["what"] != self.doing[1]:
                return Loss(other, f"it does something else: it exchanges {sign['what']}")
            has_left = sign.get("done", 0) < self.doing[0] or (self._gone and other == self._keeper)
            if "ended" in sign and has_left:
                cause = sign["cause"]
                return Loss(other, sign["ended"]) if cause is None else Loss(*cause)
        if self._gone:
            return self._without_store("the connection to it is closed")
        no_sign = f"no sign of life for {self._patience:.0f} s"
        answered = max(self._answered, self._waiting_since)
        if time.monotonic() - answered > self._patience:
            return self._without_store(no_sign)
        silent = self._silent(self._patience, self._met)
        return Loss(silent[0], no_sign) if silent else None

    def blame(self) -> Loss | None:
        """A connection broke: return the process that ended, or gives no sign of life from now on.

        None if all of them are alive: it was the network.
        """
        began = time.monotonic()
        while time.monotonic() - began < 2 * SILENT:
            self._wake.set()
            time.sleep(_SOON)
            loss = self.look()
            if loss is not None:
                return loss
            silent = self._silent(SILENT, began)
            if silent:
                return Loss(silent[0], "it was killed, or its machine is gone")
        return None

    def slow(self) -> list[int]:
        """Return the processes that have not begun what this one waits for, by the last look."""
        return [i for i in self._others if self._sign_of(i).get("started", 0) < self.doing[0]]

    def _silent(self, limit: float, began: float) -> list[int]:
        """Return who gives no sign of life for so long, after a moment."""
        late = self._answered - limit
        since = {other: self._signs.get(other, ({}, began))[1] for other in self._others}
        return [other for other in self._others if max(since[other], began) < late]

    def _without_store(self, why: str) -> Loss:
        kept = "kept what the processes tell one another"
        if self._keeper < 0:
            return Loss(-1, f"the launcher's agent {kept}, and {why}")
        return Loss(self._keeper, f"it {kept}, and {why}")


def _key(index: int) -> str:
    return f"life/{index}"
