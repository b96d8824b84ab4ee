"""Find out from a launcher (poprun, torchrun, OpenMPI) which process this is, and meet the others.
Says which of them have not arrived.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import errno
import functools
import ipaddress
import json
import socket
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from .._base import env, interrupts, log, private
from .._base.errors import Error
from .job_folder import JobFolder
from .signed import SignedStore

dist: Any = torch.distributed
NAMESPACE = "poptorch"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
IMPATIENT = 10.0  # seconds of waiting after which a message says for whom; then twice as many, ...
_POLL = 0.005  # seconds
_WAITING = 1024  # connections that have not been accepted yet
_PORTS = range(20_000, 32_000)  # below the ports that systems assign
# For each launcher: count, index, and both on this machine. The first one that is set counts.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)
_POPDIST = ("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS")


@dataclass(frozen=True)
class Membership:
    index: int
    count: int
    local_count: int  # number of processes on this machine; 0 if no launcher says it
    local_index: int  # index among the processes on this machine
    local_replicas: int  # data-parallel copies of a model in this process
    total_replicas: int
    ipus_per_replica: int
    # number of processes that share the stages of a model, and therefore its replicas
    stage_processes: int


def from_poprun() -> bool:
    return env.is_set(_POPDIST[0])


def in_job() -> bool:
    counts = [names[0] for names in _LAUNCHERS]
    return any(env.is_set(name) for name in (*_POPDIST, *counts))


def membership() -> Membership:
    launcher = next((names for names in _LAUNCHERS if env.is_set(names[0])), _LAUNCHERS[0])
    count, index, local_count, local_index = map(env.get, launcher)
    local, shared = env.get("POPDIST_NUM_LOCAL_REPLICAS"), env.get("POPDIST_STAGE_PROCESSES")
    total = env.get("POPDIST_NUM_TOTAL_REPLICAS") or local * count // max(1, shared)
    ipus = env.get("POPDIST_NUM_IPUS_PER_REPLICA")
    return Membership(index, count, local_count, local_index, local, total, ipus, shared)


@dataclass(frozen=True)
class Endpoint:
    address: str  # a host's name or number
    port: int  # where process 0, or the launcher's agent, listens
    source: str  # the launcher that defined it


def endpoint() -> Endpoint | None:
    """Return where the processes meet, if it is defined. For OpenMPI, the port depends on
    the job.
    """
    if env.is_set("MASTER_ADDR") and env.is_set("MASTER_PORT"):
        port = env.get("MASTER_PORT")
        return Endpoint(env.get("MASTER_ADDR"), port, "MASTER_ADDR and MASTER_PORT")
    size = env.get("OMPI_COMM_WORLD_SIZE")
    if size > 1 and env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        if name:
            port = _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]
            return Endpoint("127.0.0.1", port, "OpenMPI's variables")
    return None


def own_address() -> str:
    """Return this machine's address towards the endpoint, which is the same for all its
    processes.
    """
    where = endpoint()
    if where is not None:
        with contextlib.suppress(OSError):
            family, kind, number, _, address = socket.getaddrinfo(
                where.address, where.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, number) as towards:
                towards.connect(address)  # sends nothing
                return str(towards.getsockname()[0])
    return socket.gethostname()


def store_owner() -> int:
    """Return the process with which the store ends; -1 if it is torchrun's agent."""
    return -1 if env.get("TORCHELASTIC_USE_AGENT_STORE") else 0


class Outcome(Future[Any]):
    """The result of work in a thread, with the interface of torch's works, for calls without a
    usable timeout.
    """

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__()
        self._do = do

    def finish(self) -> None:
        try:
            self.set_result(self._do())
        except Exception as error:
            self.set_exception(error)

    is_completed = Future.done

    def wait(self, limit: datetime.timedelta | None = None) -> None:
        seconds = None if limit is None else limit.total_seconds()
        if not (self.done() or concurrent.futures.wait([self], seconds).done):
            raise RuntimeError(f"the messages were not exchanged within {seconds} s")
        self.result()


class Background(Outcome):
    """Work in its own daemon thread."""

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__(do)
        Thread(target=self.finish, name="poptorch messages", daemon=True).start()


class Line:
    """A daemon thread that is kept for several works, one after another.

    Python's executors wait for their threads at exit, and a thread that waits for a lost process
    never ends.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Outcome] = SimpleQueue()
        Thread(target=self._run, name="poptorch messages", daemon=True).start()

    def put(self, do: Callable[[], Any]) -> Outcome:
        outcome = Outcome(do)
        self._queue.put(outcome)
        return outcome

    def _run(self) -> None:
        while True:
            self._queue.get().finish()


class Impatience:
    def __init__(self, index: int) -> None:
        self._index = index
        self._began, self._limit = time.monotonic(), IMPATIENT

    def warn(self, whom: str, why: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._limit and whom:
            self._limit *= 2
            text = "Process %d has waited %.0f s for %s to %s"
            log.python.warning(text, self._index, waited, whom, why)


@dataclass(frozen=True)
class Meeting:
    """Where the processes have met, and what is stored there."""

    store: Any  # has these methods: set, get, multi_get, check, delete_key, clone
    torchs: Any  # torch's groups connect through it; None if the script has opened one
    owner: int  # the process with which the store ends; -1 for none of them
    leave: Callable[[], None] = lambda: None


def open_store(index: int, count: int, timeout: datetime.timedelta) -> Meeting:
    where = endpoint()
    if where is not None and _on_one_machine(where, count):
        return _meet_in_a_folder(where, index, count, timeout)
    key = env.get("POPTORCH_JOB_KEY")
    if dist.is_initialized():  # the user's script has connected the processes
        inner = dist.PrefixStore(NAMESPACE, private.get_default_store())
        return Meeting(_signed(inner, key, NAMESPACE), None, store_owner())
    if where is None:
        raise Error(
            "The address at which the processes of this job meet is not set",
            got=f"process {index} of {count}; MASTER_ADDR and MASTER_PORT are not set",
            fix=(
                (
                    f"start the processes together: poprun --num-instances {count} python "
                    f"script.py, or torchrun --nproc-per-node {count} script.py"
                ),
                (
                    "or set MASTER_ADDR and MASTER_PORT in all processes to the address and a "
                    "free port of process 0"
                ),
                "or let each process work alone: options.Distributed.disable()",
            ),
        )
    _note(where)
    try:
        # In a thread, because torch waits for the other processes without a way to interrupt it.
        making = Background(lambda: _network_store(where, index, count, timeout))
        impatience = Impatience(index)
        while not making.done():
            interrupts.check()
            concurrent.futures.wait([making], 0.2)
            impatience.warn("the other processes", "begin the job")
        inner = dist.PrefixStore(NAMESPACE, making.result())
        name = meet(_signed(inner, key, NAMESPACE), index, count, timeout)
        inner = dist.PrefixStore(name, inner)
        return Meeting(_signed(inner, key, name), inner, store_owner())
    except (RuntimeError, ValueError, OSError) as error:  # torch's network errors are RuntimeErrors
        if isinstance(error, Error):
            raise
        owner = store_owner()
        listener = "the launcher's agent" if owner < 0 else f"process {owner}"
        first = str(error).splitlines()[0]
        raise _not_found(
            f"process {index} of {count} at {where.address}:{where.port} (from {where.source}), "
            f"where {listener} listens: {first}",
            "if another program listens there, choose another MASTER_PORT",
        ) from error


def _not_found(got: str, fix: str) -> Error:
    return Error(
        "The processes of this job cannot find each other",
        got=got,
        fix=(
            (
                "start all processes with the same MASTER_ADDR and MASTER_PORT, and give each a "
                "different index"
            ),
            fix,
        ),
    )


def _on_one_machine(where: Endpoint, count: int) -> bool:
    member = membership()
    return where.address in LOOPBACK or count == member.count == member.local_count


def _meet_in_a_folder(
    where: Endpoint, index: int, count: int, timeout: datetime.timedelta
) -> Meeting:
    env.set_if_absent("GLOO_SOCKET_IFNAME", "lo")
    _note(where)
    launcher = env.get("TORCHELASTIC_RUN_ID"), env.get("PMIX_NAMESPACE")
    job = (where.address, str(where.port), *launcher, str(count))
    place = JobFolder(job, index, count)
    name = meet(place.store, index, count, timeout)
    start = place.of_start(name)
    torchs = None if dist.is_initialized() else dist.FileStore(place.torchs_file(name), count)
    return Meeting(start, torchs, -1, functools.partial(place.leave, start))


def _note(where: Endpoint) -> None:
    """Let other torch groups that the script opens meet at the same place."""
    env.set_if_absent("MASTER_ADDR", where.address)
    env.set_if_absent("MASTER_PORT", str(where.port))


def _network_store(where: Endpoint, index: int, count: int, timeout: datetime.timedelta) -> Any:
    keeps = index == store_owner()
    return dist.TCPStore(
        where.address,
        where.port,
        count,
        keeps,
        timeout,
        multi_tenant=True,
        master_listen_fd=listening(where.address, where.port) if keeps else None,
    )


def listening(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens at one address, because torch would listen at
    all.

    It listens at all of them if the address belongs to another machine that forwards connections,
    or if it leads from this machine to itself, as a host's own name may.
    """
    family, *_, at = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    leads_back = ipaddress.ip_address(str(at[0]).partition("%")[0]).is_loopback
    if address in LOOPBACK or not leads_back:
        try:
            return socket.create_server(at, family=family, backlog=_WAITING).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), backlog=_WAITING).detach()


def _signed(store: Any, key: str, name: str) -> Any:
    return SignedStore(store, key, name) if key else store


def meet(store: Any, index: int, count: int, timeout: datetime.timedelta) -> str:
    """Return a new name on which all processes of this start of the job have agreed.

    An agent that restarts processes keeps its store, and with several hosts nothing else
    distinguishes the starts. Therefore each process writes a new token, and process 0 invites the
    processes that it finds with a new name, until all have accepted.
    """
    token = uuid.uuid4().hex
    store.set(f"arrived/{index}", token)
    end = time.monotonic() + timeout.total_seconds()
    name, impatience = "", Impatience(index)
    while time.monotonic() < end:
        interrupts.check()
        if not store.check([f"arrived/{index}"]):  # another start has removed it
            store.set(f"arrived/{index}", token)
        name = _invite(store, count, name) if index == 0 else _accept(store, index, token, name)
        answers = [_accepted(name, other) for other in (range(1, count) if index == 0 else [0])]
        if name and store.check(answers):
            if index == 0:
                store.set(_accepted(name, 0), "")  # from now on the name is valid
            return name
        impatience.warn(_missing(store, index, count, name), "begin the job")
        time.sleep(_POLL)
    missing = _missing(store, index, count, name)
    raise _not_found(
        f"process {index} of {count} has waited {timeout.total_seconds():.0f} s"
        + (f" for {missing}" if missing else ""),
        "in a program that is started by a process of a job: options.Distributed.disable()",
    )


def _missing(store: Any, index: int, count: int, name: str) -> str:
    missing = [other for other in range(count) if not store.check([f"arrived/{other}"])]
    if not missing:  # they had arrived, and may have ended since
        others = range(1, count) if index == 0 else [0]
        missing = [other for other in others if not store.check([_accepted(name, other)])]
    return f"process {', '.join(map(str, missing))}" if missing else ""


def _invite(store: Any, count: int, name: str) -> str:
    """Invite the processes that have arrived, with another name if one of them was replaced."""
    keys = [f"arrived/{index}" for index in range(count)]
    if not store.check(keys):
        return name
    tokens = [store.get(key).decode() for key in keys]
    if name and json.loads(store.get("invited"))[1] == tokens:
        return name
    name = uuid.uuid4().hex
    store.set("invited", json.dumps([name, tokens]))
    return name


def _accept(store: Any, index: int, token: str, name: str) -> str:
    if not store.check(["invited"]):
        return name
    invited, tokens = json.loads(store.get("invited"))
    if invited == name or index >= len(tokens) or tokens[index] != token:
        return name
    store.set(_accepted(invited, index), "")
    return str(invited)


def _accepted(name: str, index: int) -> str:
    return f"accepted/{name}/{index}"
