"""Define all enums of PopTorch. Their integer values are part of the interface."""

from __future__ import annotations

import enum

__all__ = [
    "AnchorMode", "AutoStage", "CommGroupType", "Compiler", "ConnectionType", "DataLoaderMode",
    "HalfFloatCastingBehavior", "Liveness", "MatMulSerializationMode", "MeanReductionStrategy",
    "MultiConvPartialsType", "MultiConvPlanType", "OutputMode", "OverlapMode", "ReductionType",
    "SharingStrategy", "SyncPattern", "VariableRetrievalMode",
]  # fmt: skip


class OutputMode(enum.IntEnum):
    """Which results a call returns. ``Default`` means ``All`` for inference and ``Final`` for
    training.
    """

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
    """How gradients of accumulation steps and replicas are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.IntEnum):
    """When the sum is divided to get a mean. All choices are equal in exact arithmetic."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(enum.IntEnum):
    """How often devices and host synchronise."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2
    PingPong = 2  # name in release 1.0


class Compiler(enum.IntEnum):
    """The compiler of a function in ``poptorch.experimental``. All members have the same
    effect here.
    """

    PopART = 0
    MLIR = 1


class DataLoaderMode(enum.IntEnum):
    """Where data is loaded: in this process, in another one, or in another one that also combines
    batches.
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How the loading process starts and receives the data set."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OverlapMode(enum.Enum):
    """Which loop overlaps input or output with compute."""

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
    """How stage ids are chosen: equal to the IPU id, or counting new blocks."""

    SameAsIpu = 0
    AutoIncrement = 1


class CommGroupType(enum.IntEnum):
    """How replicas form groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Which replicas' values are read back. No member has the value 1."""

    OnePerGroup = 0
    AllReplicas = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Deprecated: the type in which operands of mixed half and float types are computed."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MultiConvPlanType(enum.IntEnum):
    """Run the convolutions of a MultiConv side by side or one after another."""

    Parallel = 0
    Serial = 1


class MultiConvPartialsType(enum.IntEnum):
    """Deprecated name of the partials type of a MultiConv (releases 1.4 to 2.0)."""

    Float = 0
    Half = 1


class MatMulSerializationMode(enum.Enum):
    """Along which dimension a matrix multiplication is split."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"
