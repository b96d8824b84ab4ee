"""Provide PopDist's functions, based on torch.distributed: the rank of this process, the size of
the job.

Outside of a job there is one instance with one replica. ``poprun`` starts jobs, and so do
``torchrun`` and ``mpirun``. Source: PopDist and PopRun user guide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from poptorch import _job
from poptorch._base import log
from poptorch._base.errors import InvalidValue
from poptorch._ir.spec import Runtime

__all__ = [
    "checkNumIpusPerReplica", "execute_on_instances", "finalizeBackend", "getDeviceId",
    "getInstanceIndex", "getLocalInstanceIndex", "getNumInstances", "getNumIpusPerReplica",
    "getNumLocalReplicas", "getNumStageProcesses", "getNumTotalReplicas", "init",
    "initializeBackend", "isPopdistEnvSet", "registerBackend", "registerCommunicator",
]  # fmt: skip


def isPopdistEnvSet() -> bool:
    """Return whether a launcher (poprun, torchrun, OpenMPI) has started this process."""
    return _job.in_job()


def init() -> None:
    """Connect to the other processes of the job now, instead of at the first training call.

    Outside of a job this has no effect.

    Raises:
        poptorch.Error: the other processes cannot be reached.
    """
    member = _job.membership()
    if member.count > 1:
        _job.join(member.index, member.count, Runtime.process_timeout)


def getInstanceIndex() -> int:
    """Return the index of this process in the job, from 0."""
    return _job.membership().index


def getLocalInstanceIndex() -> int:
    """Return the index of this process among those of the job on this machine, from 0."""
    return _job.membership().local_index


def getNumInstances() -> int:
    """Return how many processes the job has."""
    return _job.membership().count


def getNumTotalReplicas() -> int:
    """Return how many replicas the job has. Processes that share stages count as one."""
    return _job.membership().total_replicas


def getNumLocalReplicas() -> int:
    """Return how many replicas run on this process, completely or in part."""
    return _job.membership().local_replicas


def getNumIpusPerReplica() -> int:
    """Return how many IPUs each replica has."""
    return _job.membership().ipus_per_replica


def getNumStageProcesses() -> int:
    """Return how many processes share the stages of each model. An addition to PopDist."""
    return _job.membership().stage_processes


def checkNumIpusPerReplica(num_ipus: int) -> None:
    """Check that a model uses the number of IPUs that the launcher assigned.

    Raises:
        ValueError: they differ, in a job that poprun has started.
    """
    member = _job.membership()
    if _job.from_poprun() and num_ipus != member.ipus_per_replica:
        raise InvalidValue(
            "The number of IPUs per replica differs from the launcher's setting",
            got=f"{num_ipus}; poprun --ipus-per-replica {member.ipus_per_replica}",
            fix=f"start the job with poprun --ipus-per-replica {num_ipus}",
        )


def getDeviceId(num_ipus: int | None = None) -> None:
    """Return None, because each process uses any free devices of the pod.

    Args:
        num_ipus: has no effect.
    """


def execute_on_instances(
    instances: Collection[int], function: Callable[..., Any] | None = None, *args: Any, **kw: Any
) -> Any:
    """Call a function on some instances only; the others get None and do not wait.

    Args:
        instances: the indices of these instances.
        function: called now, with the other arguments. Without it you get a decorator for functions
            that you call later.

    Returns:
        The function's result, or None on the other instances; or the decorator.
    """
    if function is None:
        return functools.partial(_limited, frozenset(instances))
    return _limited(frozenset(instances), function)(*args, **kw)


def _limited(instances: frozenset[int], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        return function(*args, **kw) if getInstanceIndex() in instances else None

    return call


def initializeBackend(*args: Any, **kw: Any) -> None:
    """Call ``init``. The arguments, which selected MPI or another backend, have no effect."""
    init()


def finalizeBackend() -> None:
    """Do nothing: a process leaves its job when it ends."""


def registerBackend(*args: Any, **kw: Any) -> None:
    """Warn that torch.distributed is the only backend. Nothing is registered."""
    log.python.warning("popdist.registerBackend has no effect: torch.distributed is used")


def registerCommunicator(*args: Any, **kw: Any) -> None:
    """Warn that torch.distributed is the only backend. Nothing is registered."""
    log.python.warning("popdist.registerCommunicator has no effect: torch.distributed is used")
