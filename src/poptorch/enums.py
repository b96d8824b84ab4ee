"""Every enum of PopTorch; the integers are part of the interface."""

from __future__ import annotations

import enum

__all__ = [
    "AnchorMode", "AutoStage", "CommGroupType", "Compiler", "ConnectionType", "DataLoaderMode",
    "HalfFloatCastingBehavior", "Liveness", "MatMulSerializationMode", "MeanReductionStrategy",
    "MultiConvPartialsType", "MultiConvPlanType", "OutputMode", "OverlapMode", "ReductionType",
    "SharingStrategy", "SyncPattern", "VariableRetrievalMode",
]  # fmt: skip


class OutputMode(enum.IntEnum):
    """Which results of a call come back; Default means All for inference and Final for training."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode


class ConnectionType(enum.IntEnum):
    """When to acquire the device: before compiling, before running, or never (compile only)."""

    Always = 0
    OnDemand = 1
    Never = 2


class ReductionType(enum.IntEnum):
    """How gradients are combined over accumulation steps and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.IntEnum):
    """Where the division of a mean takes place; equal in exact arithmetic."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(enum.IntEnum):
    """Synchronisation between devices and the host."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2
    PingPong = 2  # its name in release 1.0


class Compiler(enum.IntEnum):
    """What compiles a function of ``poptorch.experimental``; here there is one compiler."""

    PopART = 0
    MLIR = 1


class DataLoaderMode(enum.IntEnum):
    """In this process, in another process, or in another process that assembles batches."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How the loading process starts and gets the data set."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OverlapMode(enum.Enum):
    """Which loop overlaps its input or output with compute."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class Liveness(enum.IntEnum):
    """When tensors leave the chip in phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(enum.IntEnum):
    """Stage ids follow the IPU id, or a counter of new blocks."""

    SameAsIpu = 0
    AutoIncrement = 1


class CommGroupType(enum.IntEnum):
    """How replicas form groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Which replicas' values are read back. There is no member 1."""

    OnePerGroup = 0
    AllReplicas = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Deprecated: how mixed half and float operands resolve."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MultiConvPlanType(enum.IntEnum):
    """Run the convolutions of a MultiConv side by side or one after another."""

    Parallel = 0
    Serial = 1


class MultiConvPartialsType(enum.IntEnum):
    """Legacy (1.4 to 2.0) way to name the partials type of a MultiConv."""

    Float = 0
    Half = 1


class MatMulSerializationMode(enum.Enum):
    """Which dimension of a matrix multiplication is cut into pieces."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"
