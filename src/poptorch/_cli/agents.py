"""Where torchrun's agents on several hosts meet: what they write there is signed.

An agent unpickles what it reads, and torch's store takes values from whoever connects to it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from pathlib import Path
from typing import Any

BACKEND = "poptorch"  # for ``LaunchConfig.rdzv_backend``; ``place`` is a host's among them
_CUT = 15_000  # milliseconds without an answer after which a connection is cut
_BYTES = hashlib.sha256().digest_size


class SignedBackend:
    """A ``RendezvousBackend`` that keeps states in another one, behind a digest by a secret key."""

    name = BACKEND

    def __init__(self, inner: Any, key: bytes) -> None:
        self._inner, self._key = inner, key

    def get_state(self) -> tuple[bytes, Any] | None:
        kept = self._inner.get_state()
        return None if kept is None else (self._opened(kept[0]), kept[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        kept = self._inner.set_state(self._digest(state) + state, token)
        return None if kept is None else (self._opened(kept[0]), kept[1], kept[2])

    def _digest(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, hashlib.sha256)

    def _opened(self, signed: bytes) -> bytes:
        from torch.distributed.elastic.rendezvous import RendezvousStateError

        state = signed[_BYTES:]
        if not hmac.compare_digest(signed[:_BYTES], self._digest(state)):
            raise RendezvousStateError("somebody else writes to where the hosts of this job meet")
        return state


def register() -> None:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _handler)


def _handler(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    before = {*_connections()}
    inner, store = create_backend(parameters)
    _give_up_cut({*_connections()} - before)
    signed = SignedBackend(inner, str(parameters.get("key")).encode())
    handler = create_handler(store, signed, parameters)  # type: ignore[arg-type]
    meet: Any = handler.next_rendezvous
    place = int(parameters.get("place"))

    def next_rendezvous() -> Any:
        """Give a host the place in which it was named: torch orders them by their names."""
        met = meet()
        return RendezvousInfo(met.store, place, met.world_size, met.bootstrap_store_info)

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    return handler


def _connections() -> list[int]:
    links = [(path.name, os.path.realpath(path)) for path in Path("/proc/self/fd").iterdir()]
    return [int(name) for name, file in links if "socket:" in file]


def _give_up_cut(connections: set[int]) -> None:
    """Let the kernel say that nobody answers: torch's store would wait for it without a limit."""
    for number in connections:
        with socket.socket(fileno=os.dup(number)) as each:
            if each.type == socket.SOCK_STREAM and each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CUT)
