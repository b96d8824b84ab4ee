"""Let torchrun's agents on several hosts meet, and sign what they write there.

An agent unpickles what it reads, and torch's store accepts values from everybody who connects to
it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
from pathlib import Path
from typing import Any

from .._base import env
from .._job.rendezvous import dist, listening

# for ``LaunchConfig.rdzv_backend``; each host's index in the list of hosts is its ``place``
BACKEND = "poptorch"
_CUT = 15_000  # a connection without an answer for this number of milliseconds is closed
LOCAL = "127.0.0.1"
_READING = datetime.timedelta(seconds=60)  # how long a store may take to answer
_BYTES = hashlib.sha256().digest_size


class SignedBackend:
    """A ``RendezvousBackend`` that stores states in another one, signed with a secret key."""

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
            raise RendezvousStateError(
                "a message without a valid signature arrived where the hosts of this job meet"
            )
        return state


def register() -> None:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _handler)


def _handler(parameters: Any) -> Any:
    return OneHost(parameters.run_id) if parameters.max_nodes == 1 else _many_hosts(parameters)


class OneHost:
    """A ``RendezvousHandler`` for an agent on a single host, which keeps its state in memory.

    Torch's handler opens a port for the processes on all networks. This one opens it on the
    loopback device, and uses another port for each start.
    """

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server: Any = None

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        self._server = _server(LOCAL)
        info = RendezvousStoreInfo(LOCAL, self._server.port)
        return RendezvousInfo(dist.HashStore(), 0, 1, info)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, because no other agent reads this."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._server = None
        return True


class ManyHosts:
    """A ``RendezvousHandler`` that orders hosts as the user named them.

    Torch orders hosts by their names. Like torch's handler, this one opens a store for the
    processes, but the store listens only at the host's address.
    """

    use_agent_store = True

    def __init__(self, inner: Any, place: int, address: str | None) -> None:
        self._inner, self._place = inner, place
        self._address = address or socket.getfqdn()
        self._server: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        with env.put_within("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            met = self._inner.next_rendezvous()
        self._server = _server(self._address) if met.rank == 0 else None
        port = self._server.port if self._server else None
        place = dist.PrefixStore("processes", met.store)
        info = RendezvousStoreInfo.build(met.rank, place, self._address, port)
        return RendezvousInfo(met.store, self._place, met.world_size, info)


def _server(address: str, port: int = 0) -> Any:
    """Return a store that listens at one address; torch's store listens at all addresses."""

    with socket.socket(fileno=listening(address, port)) as listener:
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=_READING,
            master_listen_fd=os.dup(listener.fileno()),
        )


def _many_hosts(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    before = {*_connections()}
    host, _, port = parameters.endpoint.rpartition(":")
    place = int(parameters.get("place"))
    try:
        if place == 0:
            store = _server(host, int(port))
        else:
            store = dist.TCPStore(host, int(port), timeout=_READING)
        inner = C10dRendezvousBackend(store, parameters.run_id)
    except (RuntimeError, OSError) as error:
        raise RendezvousConnectionError(str(error)) from error
    _give_up_cut({*_connections()} - before)
    signed = SignedBackend(inner, str(parameters.get("key")).encode())
    handler = create_handler(store, signed, parameters)  # type: ignore[arg-type]
    return ManyHosts(handler, place, parameters.local_addr)


def _connections() -> list[int]:
    links = [(path.name, os.path.realpath(path)) for path in Path("/proc/self/fd").iterdir()]
    return [int(name) for name, file in links if "socket:" in file]


def _give_up_cut(connections: set[int]) -> None:
    """Let the kernel close connections without an answer, because torch's store would wait
    forever.
    """
    for number in connections:
        with socket.socket(fileno=os.dup(number)) as each:
            if each.type == socket.SOCK_STREAM and each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CUT)
