"""What a launcher's environment says: which process of how many this is, with which replicas.

poprun sets the POPDIST variables; torchrun's agent, which it uses, and OpenMPI set theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._base import env

# Count, index and index on this machine, by launcher; the first that is set counts.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
)
_POPDIST = ("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS")


@dataclass(frozen=True)
class Membership:
    """This process and its job.

    Attributes:
        index: which process this is.
        count: how many there are.
        local_index: which of those on this machine it is.
        local_replicas: data-parallel copies of a model in this process.
        total_replicas: in all processes.
        ipus_per_replica: chips of each.
        stage_processes: processes that share the stages of a model, and so its replicas.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    local_replicas: int = 1
    total_replicas: int = 1
    ipus_per_replica: int = 1
    stage_processes: int = 1


def from_poprun() -> bool:
    """Tell whether it was poprun."""
    return env.is_set(_POPDIST[0])


def in_job() -> bool:
    """Tell whether a launcher has started this process."""
    counts = [count for count, _, _ in _LAUNCHERS]
    return any(env.is_set(name) for name in (*_POPDIST, *counts))


def membership() -> Membership:
    """Return what the environment says; one process with one replica where it says nothing."""
    index, count, local_index = 0, 1, 0
    for of_count, of_index, of_local in _LAUNCHERS:
        if env.is_set(of_count):
            index, count, local_index = env.get(of_index), env.get(of_count), env.get(of_local)
            break
    local, shared = env.get("POPDIST_NUM_LOCAL_REPLICAS"), env.get("POPDIST_STAGE_PROCESSES")
    return Membership(
        index=index,
        count=count,
        local_index=local_index,
        local_replicas=local,
        total_replicas=env.get("POPDIST_NUM_TOTAL_REPLICAS") or local * count // max(1, shared),
        ipus_per_replica=env.get("POPDIST_NUM_IPUS_PER_REPLICA"),
        stage_processes=shared,
    )
