"""Where the processes of a job meet: a store of torch.distributed.

Source: PyTorch documentation, "Distributed communication package" (environment variable
initialization) and "torchrun".
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import zlib
from dataclasses import dataclass
from typing import Any

from .._base import env, interrupts, private
from .._base.errors import Error
from .beside import Beside
from .meeting import meet
from .patience import Patience

NAMESPACE = "poptorch"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SLICE = datetime.timedelta(seconds=0.2)
_PORTS = range(20_000, 32_000)  # below those that systems hand out


@dataclass(frozen=True)
class Place:
    """An address that all processes of a job know.

    Attributes:
        address: a host's name or number.
        port: at which process 0, or the launcher's agent, listens.
        source: what said so.
    """

    address: str
    port: int
    source: str


def place() -> Place | None:
    """Return where the environment says that the processes meet; None if it says nothing.

    torchrun, poprun and most launchers set MASTER_ADDR and MASTER_PORT. OpenMPI sets neither; while
    all its processes are on this machine they meet here, at a port that its job's name gives.
    """
    if env.is_set("MASTER_ADDR") and env.is_set("MASTER_PORT"):
        port = env.get("MASTER_PORT")
        return Place(env.get("MASTER_ADDR"), port, "MASTER_ADDR and MASTER_PORT")
    size = env.get("OMPI_COMM_WORLD_SIZE")
    if size > 1 and env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        if name:
            port = _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]
            return Place("127.0.0.1", port, "OpenMPI's variables")
    return None


def open_store(index: int, count: int, timeout: datetime.timedelta) -> Any:
    """Return the store that all processes share; waits until process 0 has it.

    Raises:
        Error: nothing says where, or nobody listens there in time.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():  # by the user's script, for processes that have met
        return PrefixStore(NAMESPACE, private.get_default_store())
    where = place()
    if where is None:
        raise Error(
            "Nothing says where the processes of this job meet",
            got=f"process {index} of {count}; MASTER_ADDR and MASTER_PORT are not set",
            fix=(
                f"start them together: poprun --num-instances {count} python script.py, or "
                f"torchrun --nproc-per-node {count} script.py",
                "set MASTER_ADDR and MASTER_PORT, alike for all, to a free port of process 0",
                "options.Distributed.disable() lets each process work alone",
            ),
        )
    if where.address in LOOPBACK:
        env.set_if_absent("GLOO_SOCKET_IFNAME", "lo")
    env.set_if_absent("MASTER_ADDR", where.address)
    env.set_if_absent("MASTER_PORT", str(where.port))
    try:
        making = Beside(lambda: next(rendezvous("env://", index, count, timeout=timeout)))
        _wait(making, index)
        store, _, _ = making.result
        store = PrefixStore(NAMESPACE, store)
        return PrefixStore(meet(store, index, count, timeout), store)
    except (RuntimeError, ValueError) as error:  # torch's network errors are RuntimeErrors
        first = str(error).splitlines()[0]
        raise Error(
            "The processes of this job do not meet",
            got=f"process {index} of {count} at {where.address}:{where.port} "
            f"(from {where.source}), where {_listens()} listens: {first}",
            fix=(
                "start all of them, with one address and port; each with an index of its own",
                "choose another MASTER_PORT if something else listens there",
            ),
        ) from error


def _wait(making: Beside, index: int) -> None:
    """Wait for torch's store in a way that signals interrupt: it waits for the other processes."""
    patience = Patience(index)
    while not making.is_completed():
        interrupts.check()
        with contextlib.suppress(RuntimeError):
            making.wait(_SLICE)
        patience.say("the other processes", "begin the job")
    making.wait()


def _listens() -> str:
    return "the launcher's agent" if keeper() < 0 else f"process {keeper()}"


def own_address() -> str:
    """Return the address of this machine towards the place where the processes meet.

    Those of one machine have one. Where nothing says where that is, it is the machine's name.
    """
    where = place()
    if where is None:
        return socket.gethostname()
    with contextlib.suppress(OSError):
        family, kind, number, _, address = socket.getaddrinfo(
            where.address, where.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, number) as towards:
            towards.connect(address)  # which sends nothing
            return str(towards.getsockname()[0])
    return socket.gethostname()


def keeper() -> int:
    """Return the process with which the store ends; -1 where torchrun's agent, or poprun's, has it.

    That of a script which has initialised torch.distributed by itself is kept alike.
    """
    return -1 if env.get("TORCHELASTIC_USE_AGENT_STORE") else 0
