"""Define ``Spec``: every resolved setting of one executor with its default, immutable. The cache
key is its hash.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from ..enums import (
    AutoStage,
    ConnectionType,
    HalfFloatCastingBehavior,
    Liveness,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from . import slots
from .micro_batches import Loops
from .slots import Kind
from .traced_step import TracedStep, leaves_of

Setting = bool | int | float | str | None


@dataclass(frozen=True)
class Output:
    mode: OutputMode = OutputMode.Final
    period: int = 1


@dataclass(frozen=True)
class Reduction:
    type: ReductionType = ReductionType.Mean
    strategy: MeanReductionStrategy = MeanReductionStrategy.Post
    automatic_loss_scaling: bool = False


@dataclass(frozen=True)
class Precision:
    narrow_64bit: bool = True  # 64-bit results are returned as 32-bit
    half_float_casting: HalfFloatCastingBehavior = HalfFloatCastingBehavior.Default
    autocast: bool = True  # poptorch.autocast has an effect
    autocast_policy: tuple[tuple[str, ...], ...] = ()  # functions: half, float, promoted, demoted
    floating_point_exceptions: bool = False  # dividing by zero, overflow and so on are errors
    stochastic_rounding: bool = False  # float16 results are rounded at random
    # groups take every n-th channel instead of neighbouring channels
    strided_group_norm: bool = False
    check_indices: bool = True  # check labels and indices in the inputs before a call


class Strategy(enum.StrEnum):
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
    blocks: tuple[str, ...]  # ids
    stage: int  # its index in the strategy, or within its phase
    phase: int | None = None  # the forward phase; None in strategies without phases
    ipu: int | None = None  # the device that the user chose


@dataclass(frozen=True)
class Placement:
    """An execution strategy. Source: PopTorch user guide, "Parallel execution"."""

    strategy: Strategy = Strategy.PIPELINED
    auto_stage: AutoStage | None = AutoStage.SameAsIpu  # None if stages are named
    stages: tuple[NamedStage, ...] = ()  # in the user's order
    separate_backward_phase: bool = False  # forward and backward share no phase
    liveness: Liveness = Liveness.AlwaysLive  # when tensors leave the chip in phased strategies
    # alternate forward and backward passes, so that fewer activations are stored
    interleaved: bool = False
    first_release: bool = False  # 1.0 interface: a pipeline only needs one micro-batch per stage
    fills: bool = True  # a pipeline needs micro-batches for all stages; a shorter batch does not

    @property
    def phased(self) -> bool:
        return self.strategy in (Strategy.SERIAL_PHASED, Strategy.PARALLEL_PHASED)

    @property
    def phase_stride(self) -> int:
        return _STRIDE[self.liveness]

    @property
    def shares_last_phase(self) -> bool:
        return self.liveness == Liveness.AlwaysLive and not self.separate_backward_phase

    @property
    def total_phases(self) -> int:
        highest = max((stage.phase or 0 for stage in self.stages), default=0)
        extra = 3 if self.liveness != Liveness.AlwaysLive else int(self.separate_backward_phase)
        return highest * self.phase_stride + 1 + extra

    def find(self, block: str) -> NamedStage | None:
        return next((stage for stage in self.stages if block in stage.blocks), None)


@dataclass(frozen=True)
class Location:
    on_chip: bool = True  # instead of streaming memory
    sharded: bool = False  # each replica has a part
    load_by_io_tiles: bool = False
    store_by_io_tiles: bool = False
    min_off_chip: int | None = None  # smaller tensors stay on chip; None: the machine's default
    min_sharded: int | None = None  # smaller tensors are not divided; None: the default, 8192

    def off_chip(self, slot: slots.Slot) -> bool:
        """Return whether a tensor is stored in streaming memory."""
        return not self.on_chip and slot.numel >= max(self.min_off_chip or 0, 2)


@dataclass(frozen=True)
class Locations:
    activation: Location = field(default_factory=Location)
    weight: Location = field(default_factory=Location)
    optimizer: Location = field(default_factory=Location)
    accumulator: Location = field(default_factory=Location)
    io_tiles: int | None = None

    @property
    def named(self) -> dict[str, Location]:
        names = ("weights", "activations", "optimizer state", "accumulators")
        places = (self.weight, self.activation, self.optimizer, self.accumulator)
        return dict(zip(names, places, strict=True))

    def of(self, slot: slots.Slot) -> Location:
        state = {
            Kind.PARAM: self.weight,
            Kind.OPTSTATE: self.optimizer,
            Kind.ACCUM: self.accumulator,
        }
        return state.get(slot.kind, Location())


@dataclass(frozen=True)
class Target:
    backend: str = "auto"  # a registered name, or "auto"
    seed: int | None = None  # None for a non-deterministic one
    synthetic_data: bool = False  # skip host input and output
    # index among processes with replicas, or among groups if several share stages
    process_id: int = 0
    parts: int = 1  # number of processes that share the stages of each replica
    part: int = 0  # index of this process among them
    # latency, and bytes per second, between machines of the job
    link: tuple[float, float] | None = None
    device: str = "ipu"  # the system's chips; "model": the simulated device; "offline"
    generation: int | None = None  # generation of the chips: 1, 2, 21; None for the system's
    tiles: int | None = None  # per chip of the simulated device; None for the generation's default
    auto_round: bool = False  # reserve a power of two of chips if the model needs another number


@dataclass(frozen=True)
class Runtime:
    """Settings that can change without another compilation. They are not part of the cache key."""

    connection: ConnectionType = ConnectionType.Always  # when the device is acquired
    ipu_id: int | None = None  # the device to attach to, or None for any
    model_name: str | None = None  # in printed plans
    max_repeat_logs: int = 4  # how many times an identical engine log line is shown
    cycle_count: bool = False  # for executor.cycleCount()
    shows_progress: bool = True  # show the progress of compilations on stderr
    report: str | None = None  # directory of profile reports
    cache_dir: str | None = None  # directory of cached executables
    source_excludes: tuple[str, ...] = ()  # parts of paths that are not the user's code
    programs: int = 0  # most programs that are kept; 0: see options.programs
    check: str = "warn"  # what happens if eager PyTorch disagrees: "warn", "error"; "off"
    process_timeout: int = 15  # seconds without a heartbeat until a process counts as lost
    # start with the weights of the first process; otherwise all must have the same
    broadcast_weights: bool = True
    half_matmuls: bool = False  # products accumulate in 16 bits on an IPU
    half_convolutions: bool = False
    memory_proportions: tuple[tuple[int, float], ...] = ()  # (chip, share that a product may use)

    @property
    def is_reported(self) -> bool:
        """Whether what the calls cost is reported."""
        return self.report is not None or self.cycle_count

    @property
    def half_partials(self) -> tuple[bool, bool]:
        return self.half_matmuls, self.half_convolutions


@dataclass(frozen=True)
class Spec:
    training: bool = False  # the program computes gradients and updates weights
    loops: Loops = field(default_factory=Loops)
    output: Output = field(default_factory=Output)
    reduction: Reduction = field(default_factory=Reduction)
    precision: Precision = field(default_factory=Precision)
    target: Target = field(default_factory=Target)
    placement: Placement = field(default_factory=Placement)
    locations: Locations = field(default_factory=Locations)
    runtime: Runtime = field(default_factory=Runtime)
    module_scopes: bool = True  # names of operators contain the path of their module
    broadcast_buffers: bool = True  # replicas share one value of each buffer
    updatable_buffers: tuple[str, ...] = ()  # buffers that copyNamedBuffersToDevice may update
    anchors: tuple[tuple[str, str, OutputMode, int], ...] = ()  # (short, tensor name, mode, period)
    lanes: int = 0  # micro-batches that run side by side; 0 for the library's choice
    lane_memory: int = 0  # bytes for the intermediate values of lanes; 0 for the library's choice
    # recompute activations for the backward pass; None: placement decides
    recompute: bool | None = None

    @property
    def inner_anchors(self) -> tuple[tuple[str, str], ...]:
        """Short names and tensor names of anchors, except for the norm of gradients, which is not a
        tensor of the graph.
        """
        return tuple((short, long) for short, long, *_ in self.anchors if long != slots.NORM)

    @property
    def processes(self) -> int:
        return self.loops.processes * self.target.parts

    @property
    def process(self) -> int:
        return self.target.process_id * self.target.parts + self.target.part

    @property
    def trains_together(self) -> bool:
        return self.training and self.loops.processes > 1

    @property
    def runs_together(self) -> bool:
        """Return whether processes exchange anything. In inference, only processes that share
        stages do.
        """
        return self.trains_together or self.target.parts > 1

    @property
    def first_replica(self) -> int:
        return self.target.process_id * self.loops.replicas

    def for_cache(self) -> Spec:
        """Return the Spec without settings that may differ between runs, because the first process
        compiles for all.
        """
        target = replace(self.target, seed=None, process_id=0, part=0, link=None)
        return replace(self, target=target, runtime=Runtime())


@dataclass(frozen=True)
class OptimGroup:
    params: tuple[str, ...]  # paths, as the program names them
    settings: tuple[tuple[str, Setting], ...]  # including constant hyper-parameters, sorted by name
    variables: tuple[str, ...]  # names of the hyper-parameters that are inputs (slots.hyper)


@dataclass(frozen=True)
class OptimSpec:
    """The compiled structure of an optimizer. Its own settings and variables apply to all
    groups.
    """

    algorithm: str  # sgd, adam, adamw, rmsprop, lamb or the full name of a traced class
    groups: tuple[OptimGroup, ...]
    settings: tuple[tuple[str, Setting], ...] = ()  # accumulator dtypes as "float16", ...; sorted
    variables: tuple[str, ...] = ()  # for example loss_scaling
    common: tuple[tuple[str, ...], ...] = ()  # paths of parameters in the same memory
    # for optimizers without our own formula
    traced: TracedStep | None = field(default=None, compare=False)

    @property
    def loss_scaling(self) -> float:
        """Return the compiled-in factor, or 1 if it is a variable."""
        scaling = dict(self.settings).get("loss_scaling", 1.0)
        assert isinstance(scaling, float)
        return scaling

    @property
    def numbers_read(self) -> str:
        """Return a line about the numbers whose values a traced step reads; empty if none."""
        found = []
        traced = self.traced.groups if self.traced is not None else ()
        for at, (group, own) in enumerate(zip(self.groups, traced, strict=False)):
            numbers = {each.name for each in leaves_of(own.values) if each.number}
            names = [name for name, _ in group.settings if name in numbers]
            found += [f"{', '.join(names)} of parameter group {at}"] if names else []
        return f"constants of the optimizer's step: {'; '.join(found)}" if found else ""

    @property
    def max_grad_norm(self) -> float:
        limit = dict(self.settings).get("max_grad_norm", math.inf)
        assert isinstance(limit, float)
        return limit

    @property
    def clips(self) -> bool:
        return self.max_grad_norm != math.inf
