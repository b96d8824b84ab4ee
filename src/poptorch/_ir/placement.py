"""How the user spread a model's blocks over devices and time: a frozen execution strategy.

Source: PopTorch user guide, "Parallel execution". Which stage a block of a
traced model really gets is decided by the placement room; these are only the user's words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..enums import AutoStage, Liveness


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
