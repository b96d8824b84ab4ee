"""Options of a wrapped model and their groups. Source: spec/options.md."""

from .attribute import Attribute
from .distributed import _DistributedOptions
from .files import ConfigFileError
from .jit import _JitOptions
from .locations import TensorLocationSettings, _TensorLocationOptions
from .options import Options
from .popart import _PopartOptions
from .precision import _PrecisionOptions
from .stages import Phase, Stage
from .strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from .training import _TrainingOptions

__all__ = [
    "Attribute",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_IExecutionStrategy",
    "_IPhasedExecution",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]
