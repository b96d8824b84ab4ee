"""``opts.Distributed``: this process among those that train together."""

from __future__ import annotations

from typing import Any, Self

from .._base import env, log
from .._base.errors import InvalidValue
from .container import Container
from .table import LOGS, RULES, Value, expect, option, row

TIMEOUT = 15  # seconds, of ``processTimeout``
# Of OpenMPI, which PopTorch read, and of torchrun.
_LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "RANK"))


class _DistributedOptions(Container):
    """Process index and count; at construction from the variables of OpenMPI or torchrun.

    Attributes:
        num_distributed_processes: processes that train together.
        distributed_process_id: index of this one.
        ipuof_configs: fabric settings of launchers; kept, not used.
        stage_processes: processes that share the stages of each replica.
    """

    num_distributed_processes: int
    distributed_process_id: int
    ipuof_configs: dict[Any, Any]
    stage_processes: int

    def __init__(self) -> None:
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
                break

    @row(
        RULES,
        Value("num_distributed_processes", 1, least=1, decides="loops.processes", here=True),
        Value("distributed_process_id", 0, decides="target.process_id", here=True),
    )
    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Set the index of this process, then the number of processes.

        A data loader then gives each process its part of the data, and a model trains on the
        replicas of all of them: their gradients are added up at each update. A launcher's variables
        (``poprun``, ``torchrun``, OpenMPI) do this by themselves.
        """
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)

    @option(LOGS, "process_timeout", TIMEOUT, least=1, field="runtime.process_timeout", here=True)
    def processTimeout(self, seconds: int) -> Self:
        """Set after how many seconds without a sign of life a process counts as lost.

        The others then end with an error that names it. One whose connections break, as those of a
        process that is killed do, is found out sooner; one that is only slow is waited for. This
        option is not PopTorch's.
        """

    @option(LOGS, "broadcast_weights", True, field="runtime.broadcast_weights")
    def broadcastWeights(self, broadcast: bool) -> Self:
        """Say whether all begin with process 0's weights; if not, they are compared and must agree.

        So must the optimizer's state. What differs is an error in every process, which names it.
        This option is not PopTorch's.
        """

    @option(RULES, "stage_processes", 1, least=1, field="target.parts", here=True)
    def stageProcesses(self, processes: int) -> Self:
        """Spread the stages of each replica over so many processes: each runs some of the chips.

        They are given the same batches and return the same results; activations and gradients go
        from process to process. The ``staged`` backend runs them. A job of 8 processes with
        ``stageProcesses(4)`` trains on two copies of the model, times the local replicas. This
        option is not PopTorch's.
        """

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the count and the index from two environment variables, now.

        Unset variables count as 1 process and index 0.

        Raises:
            InvalidValue: a variable holds no integer (a ``ValueError``).
        """
        expect("var_num_processes", var_num_processes, str)
        expect("var_process_id", var_process_id, str)
        return self.configureProcessId(
            _integer(var_process_id, "0"), _integer(var_num_processes, "1")
        )

    def disable(self) -> Self:
        """Be process 0 of 1, whatever the environment says."""
        return self.configureProcessId(0, 1)

    @property
    def processId(self) -> int:
        """Index of this process."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """Number of processes that train together."""
        return self.num_distributed_processes


def data_share(distributed: Any) -> tuple[int, int]:
    """Return which share of the data a process reads, of how many: one for those of one model."""
    parts = max(1, distributed.stage_processes)  # less is refused at compile
    return distributed.processId // parts, distributed.numProcesses // parts


def _integer(variable: str, default: str) -> int:
    text = env.raw(variable, default)
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(
            f"Environment variable {variable} is not an integer", got=repr(text)
        ) from None
