"""Spec: every resolved setting of one executor, frozen. The cache key hashes it whole.

``poptorch.options`` translates an ``Options`` object into a Spec once, when a model is wrapped;
nothing below the front door imports ``Options``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from ..enums import (
    AutoStage,
    ConnectionType,
    Liveness,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from . import slots
from .loops import Loops


@dataclass(frozen=True)
class Output:
    """Which results of a call come back: a resolved mode (never Default) and its period."""

    mode: OutputMode = OutputMode.Final
    period: int = 1


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined over accumulation steps, replicas and processes."""

    type: ReductionType = ReductionType.Mean
    strategy: MeanReductionStrategy = MeanReductionStrategy.Post
    automatic_loss_scaling: bool = False


@dataclass(frozen=True)
class Precision:
    """Number formats and rounding (PopTorch user guide, "Half / float 16 support").

    Attributes:
        narrow_64bit: results of 64-bit types come back as 32-bit.
        half_float_downcast: mixed half and float operands are computed in half, not in float.
        autocast: whether ``poptorch.autocast`` has an effect.
        autocast_policy: names of functions: in half, in float, promoted and demoted when mixed;
            empty for torch's own choice.
        floating_point_exceptions: a run that divides by zero, overflows, ... fails.
        stochastic_rounding: float16 results are rounded at random.
        strided_group_norm: GroupNorm's groups take every n-th channel rather than neighbours.
        check_indices: labels and indices among the inputs are looked at before anything runs.
    """

    narrow_64bit: bool = True
    half_float_downcast: bool = True
    autocast: bool = True
    autocast_policy: tuple[tuple[str, ...], ...] = ()
    floating_point_exceptions: bool = False
    stochastic_rounding: bool = False
    strided_group_norm: bool = False
    check_indices: bool = True


class Strategy(enum.StrEnum):
    """The four execution strategies."""

    PIPELINED = "pipelined"
    SHARDED = "sharded"
    SERIAL_PHASED = "serial_phased"
    PARALLEL_PHASED = "parallel_phased"


_STRIDE = {
    Liveness.AlwaysLive: 1,
    Liveness.OffChipAfterFwd: 1,
    Liveness.OffChipAfterFwdNoOverlap: 2,
    Liveness.OffChipAfterEachPhase: 4,
}


@dataclass(frozen=True)
class NamedStage:
    """One stage that the user wrote down.

    Attributes:
        blocks: ids of the blocks that belong to it.
        stage: its position, from 0: in the strategy, or within its phase.
        phase: the forward phase that it is part of; None in unphased strategies.
        ipu: the device that the user fixed, or None.
    """

    blocks: tuple[str, ...]
    stage: int
    phase: int | None = None
    ipu: int | None = None


@dataclass(frozen=True)
class Placement:
    """An execution strategy.

    Attributes:
        strategy: which of the four.
        auto_stage: how blocks become stages when none are named; None when stages are named.
        stages: the named stages, in the user's order.
        separate_backward_phase: whether forward and backward share no phase.
        liveness: when tensors leave the chip in phased strategies.
        interleaved: whether a pipeline alternates forward and backward passes (fewer activations
            wait) rather than grouping them.
        first_release: whether the 1.0 interface was used, in whose rule a pipeline needs as many
            micro-batches as it has forward stages; later ones ask for 2 n - 1 in training.
    """

    strategy: Strategy = Strategy.PIPELINED
    auto_stage: AutoStage | None = AutoStage.SameAsIpu
    stages: tuple[NamedStage, ...] = ()
    separate_backward_phase: bool = False
    liveness: Liveness = Liveness.AlwaysLive
    interleaved: bool = False
    first_release: bool = False

    @property
    def phased(self) -> bool:
        """Whether the strategy works in phases."""
        return self.strategy in (Strategy.SERIAL_PHASED, Strategy.PARALLEL_PHASED)

    @property
    def phase_stride(self) -> int:
        """Internal phases per forward phase that the user named."""
        return _STRIDE[self.liveness]

    @property
    def shares_last_phase(self) -> bool:
        """Whether the backward pass begins in the phase in which the forward pass ends."""
        return self.liveness == Liveness.AlwaysLive and not self.separate_backward_phase

    @property
    def total_phases(self) -> int:
        """Internal phases that logs report as ``executionPhaseSettings.phases``."""
        highest = max((stage.phase or 0 for stage in self.stages), default=0)
        if self.liveness != Liveness.AlwaysLive:
            extra = 3
        else:
            extra = 1 if self.separate_backward_phase else 0
        return highest * self.phase_stride + 1 + extra

    def find(self, block: str) -> NamedStage | None:
        """The stage that names a block, or None."""
        return next((stage for stage in self.stages if block in stage.blocks), None)


@dataclass(frozen=True)
class Location:
    """Where one kind of tensor rests (PopTorch user guide, "Options").

    Attributes:
        on_chip: on chip rather than in streaming memory.
        sharded: each replica holds a part.
        load_by_io_tiles, store_by_io_tiles: whether transfers go through the I/O tiles.
        min_off_chip: tensors with fewer elements stay on chip; None for the machine's default.
        min_sharded: tensors with fewer elements stay whole; None for the default, 8192.
    """

    on_chip: bool = True
    sharded: bool = False
    load_by_io_tiles: bool = False
    store_by_io_tiles: bool = False
    min_off_chip: int | None = None
    min_sharded: int | None = None


@dataclass(frozen=True)
class Locations:
    """Where every kind of tensor rests, and how many tiles per chip are kept for I/O."""

    activation: Location = field(default_factory=Location)
    weight: Location = field(default_factory=Location)
    optimizer: Location = field(default_factory=Location)
    accumulator: Location = field(default_factory=Location)
    io_tiles: int | None = None


@dataclass(frozen=True)
class Target:
    """What runs the program.

    Attributes:
        backend: a registered backend name, or ``"auto"``.
        seed: the random seed, or None for a non-deterministic one.
        synthetic_data: host input and output are skipped (``enableSyntheticData``).
        process_id: the index of this process among those that hold replicas, each with all stages;
            of the group that it belongs to, where several share the stages.
        parts: processes that share the stages of each replica.
        part: which of these this one is.
        hosts: machines that the processes of the job are on, found out when they meet.
        device: ``"ipu"`` (the system's chips), ``"model"`` (the simulated device) or
            ``"offline"`` (compile only).
        generation: of the chips: 1, 2 or 21; None for whatever the system has.
        tiles: per chip of the simulated device; None for the generation's own count.
        auto_round: reserve a power of two of chips when the model needs fewer.
    """

    backend: str = "auto"
    seed: int | None = None
    synthetic_data: bool = False
    process_id: int = 0
    parts: int = 1
    part: int = 0
    hosts: int = 1
    device: str = "ipu"
    generation: int | None = None
    tiles: int | None = None
    auto_round: bool = False


@dataclass(frozen=True)
class Runtime:
    """What can change without another compilation; no part of the cache key.

    Attributes:
        connection: when the device is acquired.
        ipu_id: the device id to attach to, or None for any.
        model_name: what printed plans call the model; None for nothing.
        max_repeat_logs: how often an identical engine log line appears.
        cycle_count: whether cycles are counted for ``executor.cycleCount()``.
        report: directory of profile reports, or None.
        cache_dir: directory of cached executables, or None.
        source_excludes: path fragments that are not the user's code when lines are sought.
        programs: kinds of inputs that the model stays compiled for.
        process_timeout: seconds without a sign of life after which a process counts as lost.
        broadcast_weights: processes begin with the weights of the first; otherwise all must have
            the same.
        half_matmuls, half_convolutions: whether products keep their sums in 16 bits on an IPU.
        memory_proportions: (chip, share of its memory that one product may use on an IPU).
    """

    connection: ConnectionType = ConnectionType.Always
    ipu_id: int | None = None
    model_name: str | None = None
    max_repeat_logs: int = 4
    cycle_count: bool = False
    report: str | None = None
    cache_dir: str | None = None
    source_excludes: tuple[str, ...] = ()
    programs: int = 1
    process_timeout: int = 15
    broadcast_weights: bool = True
    half_matmuls: bool = False
    half_convolutions: bool = False
    memory_proportions: tuple[tuple[int, float], ...] = ()

    @property
    def half_partials(self) -> tuple[bool, bool]:
        """Whether matrix products, and convolutions, keep their sums in 16 bits on an IPU."""
        return self.half_matmuls, self.half_convolutions


@dataclass(frozen=True)
class Spec:
    """Every resolved setting of one executor.

    Attributes:
        training: whether the program computes gradients and updates weights.
        placement: the execution strategy.
        locations: where tensors rest.
        module_scopes: whether operators' names carry the path of their module.
        broadcast_buffers: whether replicas share one value of each buffer.
        updatable_buffers: names of buffers that ``copyNamedBuffersToDevice`` may update.
        anchors: ``(short name, tensor name, mode, period)`` of anchored tensors.
        lanes: micro-batches that run side by side; 0 for the library's choice.
        lane_memory: bytes for the intermediate values of lanes; 0 for the library's choice.
        recompute: whether the backward pass computes activations again; None where the placement
            decides.
    """

    training: bool = False
    loops: Loops = field(default_factory=Loops)
    output: Output = field(default_factory=Output)
    reduction: Reduction = field(default_factory=Reduction)
    precision: Precision = field(default_factory=Precision)
    target: Target = field(default_factory=Target)
    placement: Placement = field(default_factory=Placement)
    locations: Locations = field(default_factory=Locations)
    runtime: Runtime = field(default_factory=Runtime)
    module_scopes: bool = True
    broadcast_buffers: bool = True
    updatable_buffers: tuple[str, ...] = ()
    anchors: tuple[tuple[str, str, OutputMode, int], ...] = ()
    lanes: int = 0
    lane_memory: int = 0
    recompute: bool | None = None

    @property
    def inner_anchors(self) -> tuple[tuple[str, str], ...]:
        """Short and tensor names of anchors but the norm of gradients, which needs no tensor."""
        return tuple((short, long) for short, long, *_ in self.anchors if long != slots.NORM)

    @property
    def processes(self) -> int:
        """How many processes the job has."""
        return self.loops.processes * self.target.parts

    @property
    def process(self) -> int:
        """Which of all processes of the job this one is."""
        return self.target.process_id * self.target.parts + self.target.part

    @property
    def trains_together(self) -> bool:
        """Whether several processes add their gradients up."""
        return self.training and self.loops.processes > 1

    @property
    def runs_together(self) -> bool:
        """Whether processes exchange anything: in inference only those that share stages do."""
        return self.trains_together or self.target.parts > 1

    @property
    def first_replica(self) -> int:
        """The number of this process's first replica among those of all."""
        return self.target.process_id * self.loops.replicas

    def for_cache(self) -> Spec:
        """This Spec without what may change from run to run.

        That is the Runtime part, the seed, and which of several processes this one is: the first
        process compiles for all.
        """
        target = replace(self.target, seed=None, process_id=0, part=0)
        return replace(self, target=target, runtime=Runtime())
