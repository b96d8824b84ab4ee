"""Define the options of a wrapped model. ``__all__`` lists the names that PopTorch has at
top level.
"""

from .attribute import Attribute
from .distributed import _DistributedOptions as _DistributedOptions
from .files import ConfigFileError
from .groups import _JitOptions as _JitOptions
from .groups import _PrecisionOptions as _PrecisionOptions
from .groups import _TrainingOptions as _TrainingOptions
from .locations import TensorLocationSettings
from .locations import _TensorLocationOptions as _TensorLocationOptions
from .options import Options
from .popart import _PopartOptions as _PopartOptions
from .strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from .strategies import _IExecutionStrategy as _IExecutionStrategy
from .strategies import _IPhasedExecution as _IPhasedExecution

_GraphProcessingOptions = _PrecisionOptions  # name until release 2

__all__ = [
    "Attribute", "ConfigFileError", "Options", "ParallelPhasedExecution", "Phase",
    "PipelinedExecution", "SerialPhasedExecution", "ShardedExecution", "Stage",
    "TensorLocationSettings",
]  # fmt: skip
