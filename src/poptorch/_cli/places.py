"""What tells each process of a job its place in PopDist's and OpenMPI's words, beside torchrun's.

Scripts read these variables themselves. Source: PopDist and PopRun user guide; OpenMPI
documentation, "Environment variables"; PyTorch documentation, "torchrun".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPENMPIS = {
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
}


def variables(
    torchruns: Mapping[str, str], local_replicas: int, stage_processes: int
) -> dict[str, str]:
    """Return the variables of one process.

    Args:
        torchruns: those that torchrun's agent gives it.
        local_replicas: how many replicas a process has, or has stages of.
        stage_processes: how many processes share the stages of each model.
    """
    first = int(torchruns["RANK"]) // stage_processes * local_replicas
    return {
        "POPDIST_REPLICA_INDEX_OFFSET": str(first),
        "POPDIST_LOCAL_INSTANCE_INDEX": torchruns["LOCAL_RANK"],
        **{name: torchruns[theirs] for name, theirs in _OPENMPIS.items()},
    }


def logs(local_replicas: int, stage_processes: int, **settings: Any) -> Any:
    """Return where the agent sends the output of processes.

    It shows each start's variables here, to be completed: torch's own adds one, too.

    Args:
        local_replicas, stage_processes: as ``variables`` takes them.
        settings: of torch's ``DefaultLogsSpecs``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            for own in envs.values():
                own |= variables(own, local_replicas, stage_processes)
            return super().reify(envs)

    return Logs(**settings)
