"""Provide ``popdist.poptorch.Options``: options of one process of a job, as set by the launcher."""

from __future__ import annotations

from typing import NoReturn, Self

import popdist
import poptorch
from poptorch._base.errors import StateError

__all__ = ["Options"]

_SET_BY_POPRUN = (
    "remove this call: poprun sets the number of processes and the index of this process; to start "
    "n processes: poprun --num-instances n"
)


def _refuse(name: str, instead: str) -> NoReturn:
    raise StateError(f"Cannot call `{name}` with popdist.poptorch.Options", fix=instead)


class _Distributed(type(poptorch.Options().Distributed)):  # type: ignore[misc]
    """The index of this process in its job, which the launcher has set."""

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Raise a ``RuntimeError``, because the launcher sets this."""
        _refuse("Distributed.configureProcessId", _SET_BY_POPRUN)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Raise a ``RuntimeError``, because the launcher sets this."""
        _refuse("Distributed.setEnvVarNames", _SET_BY_POPRUN)

    def stageProcesses(self, processes: int) -> Self:
        """Raise a ``RuntimeError``, unless the number equals the launcher's setting, from which
        ``popdist`` computes the number of replicas.
        """
        if processes != popdist.getNumStageProcesses():
            _refuse(
                "Distributed.stageProcesses",
                (
                    f"use poprun --stage-processes {processes}; with another launcher, set "
                    f"POPDIST_STAGE_PROCESSES={processes}"
                ),
            )
        return super().stageProcesses(processes)  # type: ignore[no-any-return]

    def disable(self) -> Self:
        """Raise a ``RuntimeError``, because the launcher sets this."""
        _refuse(
            "Distributed.disable", ("use poptorch.Options in a process that is not part of a job")
        )


class Options(poptorch.Options):
    """``poptorch.Options`` of one process of a job, filled in by the launcher.

    ``replication_factor`` counts the replicas of this process. You cannot change what the launcher
    sets: ``useIpuId``, ``replicationFactor`` and the setters of ``Distributed`` raise a
    ``RuntimeError``. ``poprun --stage-processes`` sets ``Distributed.stageProcesses``.

    Args:
        ipus_per_replica: number of chips of each replica, as set by the launcher.

    Raises:
        ValueError: the number differs from the launcher's setting.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            popdist.checkNumIpusPerReplica(ipus_per_replica)
        super().replicationFactor(popdist.getNumLocalReplicas() // self.Distributed._each)
        index, count = popdist.getInstanceIndex(), popdist.getNumInstances()
        self.Distributed.configureProcessId(index, count)
        self.Distributed.stageProcesses(popdist.getNumStageProcesses())
        self.Distributed.__class__ = _Distributed

    def useIpuId(self, ipu_id: int) -> Self:
        """Raise an error, because the launcher sets this.

        Raises:
            RuntimeError: always.
        """
        _refuse("useIpuId", "remove this call: processes use any free devices of the pod")

    def replicationFactor(self, replication_factor: int) -> Self:
        """Raise an error, because the launcher sets this.

        Raises:
            RuntimeError: always.
        """
        _refuse("replicationFactor", "use poprun --num-replicas, which sets this number")
