"""Define ``opts.Distributed``: which of the processes that train together this one is."""

from __future__ import annotations

from typing import Any, Self

from .._base import env, log
from .._base.errors import InvalidValue
from .container import Container
from .option_table import LOGS, OF_FIELD, RULES, Value, expect, option, row

# The environment variables that OpenMPI sets, which PopTorch read, and those that torchrun sets.
_LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "RANK"))


class _DistributedOptions(Container):
    """The index of this process and the number of processes, from the variables of OpenMPI or
    torchrun.

    Attributes:
        num_distributed_processes: how many processes train together.
        distributed_process_id: the index of this process, from 0.
        ipuof_configs: fabric settings of launchers; they are stored but have no effect.
        stage_processes: how many processes share the stages of each replica.
    """

    num_distributed_processes: int
    distributed_process_id: int
    ipuof_configs: dict[Any, Any]
    stage_processes: int

    def __init__(self) -> None:
        self._each = env.get("POPDIST_PROCESSES_EACH")
        super().__init__(ipuof_configs={})
        for count, index in _LAUNCHERS:
            if env.is_set(count):
                self.setEnvVarNames(count, index)
                log.python.info(
                    "From %s environment variable: process %d of %d",
                    count,
                    self.processId,
                    self.numProcesses,
                )
                if self._each > 1:
                    text = "Each process does the work of %d processes, and runs their replicas"
                    log.python.info(text, self._each)
                break

    @row(
        RULES,
        Value("num_distributed_processes", 1, least=1, decides="loops.processes", here=True),
        Value("distributed_process_id", 0, decides="target.process_id", here=True),
    )
    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Set the index of this process and the number of processes.

        Each process then loads its part of the data. The processes train one model: each update
        uses the gradients of all. ``poprun``, ``torchrun`` and OpenMPI set this by themselves.
        """
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)

    @option(LOGS, "process_timeout", OF_FIELD, least=1, field="runtime.process_timeout", here=True)
    def processTimeout(self, seconds: int) -> Self:
        """Set after how many seconds without a heartbeat a process counts as lost.

        The others then end with an error that names it. They notice a killed process sooner, and
        wait for a slow one. Not a PopTorch option. Default 15.
        """

    @option(LOGS, "broadcast_weights", OF_FIELD, field="runtime.broadcast_weights")
    def broadcastWeights(self, broadcast: bool) -> Self:
        """Start all processes with the weights of process 0, or check that all have the same.

        This includes the optimizer's state. With False, any difference is an error in every
        process. Not a PopTorch option.
        """

    @option(RULES, "stage_processes", OF_FIELD, least=1, field="target.parts", here=True)
    def stageProcesses(self, processes: int) -> Self:
        """Divide the stages of each replica among this many processes; each runs some of the chips.

        The processes take the same batches and return the same results. The ``staged`` backend
        sends activations and gradients between them. A job of 8 processes with
        ``stageProcesses(4)`` trains two copies of the model, times the local replicas. Not a
        PopTorch option.
        """

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the count and the index from two environment variables, now.

        Unset variables count as 1 process and index 0.

        Raises:
            InvalidValue: a variable is not an integer (a ``ValueError``).
        """
        expect("var_num_processes", var_num_processes, str)
        expect("var_process_id", var_process_id, str)
        return self.configureProcessId(
            _integer(var_process_id, "0"), _integer(var_num_processes, "1")
        )

    def disable(self) -> Self:
        """Make this process 0 of 1, whatever the environment variables say."""
        self.configureProcessId(0, 1)
        self._each = 1
        return self

    @property
    def processId(self) -> int:
        """Index of this process."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """Number of processes that train together."""
        return self.num_distributed_processes


def data_share(distributed: Any) -> tuple[int, int]:
    """Return (index, number) of the data share that a process reads. Processes that run one model
    read the same share.
    """
    # numbers below 1 are refused when the model is compiled
    parts = max(1, distributed.stage_processes)
    return distributed.processId // parts, distributed.numProcesses // parts


def replicas(options: Any) -> int:
    """Return the replicas that a process runs: its own, and those of the processes that it
    replaces.
    """
    return int(options.replication_factor * options.Distributed._each)


def _integer(variable: str, default: str) -> int:
    text = env.raw(variable, default)
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(
            f"Environment variable {variable} is not an integer",
            got=repr(text),
            fix=f"unset {variable}, or set it to an integer: export {variable}={default}",
        ) from None
