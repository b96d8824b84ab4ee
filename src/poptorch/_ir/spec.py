"""Spec: every resolved setting of one executor, frozen. The cache key hashes it whole.

``poptorch.options`` translates an ``Options`` object into a Spec once, when a model is wrapped;
nothing below the front door imports ``Options``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..enums import CommGroupType, MeanReductionStrategy, OutputMode, ReductionType


@dataclass(frozen=True)
class Loops:
    """The counts of the device loop (spec/executor.md section 3).

    Attributes:
        iterations: device iterations per call; one optimizer update each in training.
        accumulation: micro-batches per update and replica; 1 in inference.
        replicas: data-parallel copies in this process.
        input_group_size: replicas that read the same input.
        input_group_type: how replicas form input groups.
    """

    iterations: int = 1
    accumulation: int = 1
    replicas: int = 1
    input_group_size: int = 1
    input_group_type: CommGroupType = CommGroupType.Consecutive

    @property
    def input_groups(self) -> int:
        """Groups of replicas that read different inputs."""
        return self.replicas // self.input_group_size

    @property
    def slices(self) -> int:
        """Micro-batches that one combined input is cut into."""
        return self.iterations * self.accumulation * self.input_groups

    def input_group(self, replica: int) -> int:
        """The input group that a replica reads."""
        if self.input_group_type == CommGroupType.Orthogonal:
            return replica % self.input_groups
        return replica // self.input_group_size


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
    """Number formats and rounding (spec/precision.md)."""

    narrow_64bit: bool = True
    floating_point_exceptions: bool = False
    stochastic_rounding: bool = False
    partials_dtype: torch.dtype = torch.float32
    stable_norm: bool = False


@dataclass(frozen=True)
class Target:
    """What runs the program.

    Attributes:
        backend: a registered backend name, or ``"auto"``.
        seed: the random seed, or None for a non-deterministic one.
        synthetic_data: host input and output are skipped (``enableSyntheticData``).
        processes, process_id: the place of this process among those that train together.
    """

    backend: str = "auto"
    seed: int | None = None
    synthetic_data: bool = False
    processes: int = 1
    process_id: int = 0


@dataclass(frozen=True)
class Spec:
    """Every resolved setting of one executor.

    Attributes:
        training: whether the program computes gradients and updates weights.
        broadcast_buffers: whether replicas share one value of each buffer.
        anchors: ``(short name, tensor name, mode, period)`` of anchored tensors.
        hints: everything stored that only the machine model or reports read, as sorted pairs.
    """

    training: bool = False
    loops: Loops = field(default_factory=Loops)
    output: Output = field(default_factory=Output)
    reduction: Reduction = field(default_factory=Reduction)
    precision: Precision = field(default_factory=Precision)
    target: Target = field(default_factory=Target)
    broadcast_buffers: bool = True
    anchors: tuple[tuple[str, str, OutputMode, int], ...] = ()
    hints: tuple[tuple[str, str], ...] = ()
