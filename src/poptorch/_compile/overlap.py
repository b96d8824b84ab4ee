"""Whether the settings let marked inputs and outputs move while the program computes.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

from .._base.errors import Error
from .._ir.spec import Spec, Strategy
from ..enums import OutputMode


def check_overlap(spec: Spec) -> None:
    """Check the settings of a model that calls ``set_overlap_for_input`` or ``_output``.

    Raises:
        Error: the strategy, the I/O tiles or the output mode do not allow it.
    """
    if spec.placement.strategy is Strategy.PIPELINED:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution",
            got="the default execution strategy, also with one device",
            fix="options.setExecutionStrategy(poptorch.ShardedExecution())",
        )
    if not spec.locations.io_tiles:
        raise Error(
            "No IO tiles allocated",
            got="overlapped inputs and outputs travel through tiles of their own",
            fix="options.TensorLocations.numIOTiles(32)",
        )
    if spec.output.mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            "Unsupported output mode for overlapped IO",
            got=f"OutputMode.{spec.output.mode.name}",
            fix="options.outputMode(poptorch.OutputMode.All), or Sum",
        )
