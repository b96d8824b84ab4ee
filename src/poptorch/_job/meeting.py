"""Which processes meet: those of this start of the job, and none of an earlier one.

An agent that starts all processes again keeps its store, with all that the earlier ones wrote. So
each process comes with a new token, and process 0 invites those that it finds by a new name, until
all of them have accepted it. On several hosts nothing else tells one start from the next.
"""

from __future__ import annotations

import datetime
import json
import time
import uuid
from typing import Any

from .._base import interrupts
from .._base.errors import Error
from .patience import Patience

_ROUND = 0.005  # seconds


def meet(store: Any, index: int, count: int, timeout: datetime.timedelta) -> str:
    """Return a name that all processes of this start of the job have agreed on.

    Args:
        store: that they share.
        index, count: which process this is, of how many.
        timeout: how long they wait for the last one.

    Raises:
        Error: one of them does not come.
    """
    token = uuid.uuid4().hex
    store.set(_arrived(index), token)
    end = time.monotonic() + timeout.total_seconds()
    name, patience = "", Patience(index)
    while time.monotonic() < end:
        interrupts.check()
        name = _invite(store, count, name) if index == 0 else _accept(store, index, token, name)
        answers = [_accepted(name, other) for other in (range(1, count) if index == 0 else [0])]
        if name and store.check(answers):
            if index == 0:
                store.set(_accepted(name, 0), "")  # now it holds
            return name
        patience.say(_missing(store, index, count, name), "begin the job")
        time.sleep(_ROUND)
    missing = _missing(store, index, count, name)
    raise Error(
        "The processes of this job do not meet",
        got=f"process {index} of {count} has waited {timeout.total_seconds():.0f} s"
        + (f" for {missing}" if missing else ""),
        fix=(
            "start all of them, with one address and port; each with an index of its own",
            "call options.Distributed.disable() in a program that a process of a job starts",
        ),
    )


def _missing(store: Any, index: int, count: int, name: str) -> str:
    """Say who has not come, or has not accepted; nothing of nobody."""
    missing = [other for other in range(count) if not store.check([_arrived(other)])]
    if not missing:  # they came, and may have ended since
        others = range(1, count) if index == 0 else [0]
        missing = [other for other in others if not store.check([_accepted(name, other)])]
    return f"process {', '.join(map(str, missing))}" if missing else ""


def _invite(store: Any, count: int, name: str) -> str:
    """Invite who is there; by another name when somebody has come in the place of another."""
    keys = [_arrived(index) for index in range(count)]
    if not store.check(keys):
        return name
    tokens = [store.get(key).decode() for key in keys]
    if name and json.loads(store.get("invited"))[1] == tokens:
        return name
    name = uuid.uuid4().hex
    store.set("invited", json.dumps([name, tokens]))
    return name


def _accept(store: Any, index: int, token: str, name: str) -> str:
    """Accept an invitation of this process, if there is one."""
    if not store.check(["invited"]):
        return name
    invited, tokens = json.loads(store.get("invited"))
    if invited == name or index >= len(tokens) or tokens[index] != token:
        return name
    store.set(_accepted(invited, index), "")
    return str(invited)


def _arrived(index: int) -> str:
    return f"arrived/{index}"


def _accepted(name: str, index: int) -> str:
    return f"accepted/{name}/{index}"
