"""What one flat tensor of a graph is, and what it belongs to. Frozen, hashable, printable.

``slots`` makes them; a slot's key names it and is never taken apart to learn something.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, replace

import torch


class Kind(enum.StrEnum):
    """Every role that a graph's input or output can have."""

    PARAM = "param"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    ACCUM = "accum"
    OPTSTATE = "optstate"
    HYPER = "hyper"
    RNG = "rng"
    BATCH = "batch"
    CONSTANT = "constant"
    COUNTER = "counter"
    LOSS = "loss"
    OUTPUT = "output"
    ANCHOR = "anchor"
    VALUE = "value"


STATE_KINDS = frozenset(
    {Kind.PARAM, Kind.BUFFER, Kind.ACCUM, Kind.OPTSTATE, Kind.HYPER, Kind.RNG, Kind.CONSTANT}
)


@dataclass(frozen=True)
class Slot:
    """One named tensor border of a graph.

    Attributes:
        kind: the role.
        shape: sizes of what a graph reads or writes in one run; for batch inputs, losses and
            outputs those of one micro-batch, after the lanes if there are any.
        dtype: the element type inside the program.
        name: its own name, for instance ``velocity`` of a moment or ``lr`` of a hyper-parameter.
        weight: path of the parameter that it is, or is the gradient, accumulator or moment of;
            "" for what belongs to no weight.
        index: which input, output, constant or parameter group; -1 where there is only one.
        replicas: how many values the device keeps, one for each replica; 1 if all share one.
        lanes: whether dimension 0 of the shape counts what runs side by side: lanes, and for
            state the replicas.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    weight: str = ""
    index: int = -1
    replicas: int = 1
    lanes: bool = False

    @functools.cached_property
    def path(self) -> str:
        """A name unique within the kind: ``velocity.fc1.weight``, ``fc1.weight``, ``0.lr``."""
        index = str(self.index) if self.index >= 0 else ""
        return ".".join(part for part in (index, self.name, self.weight) if part)

    @functools.cached_property  # asked for thousands of times by estimates
    def key(self) -> str:
        """``kind.path``: what State, Programs and update functions call this tensor."""
        return f"{self.kind}.{self.path}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize

    @property
    def is_state(self) -> bool:
        """Whether the value lives on the device from call to call."""
        return self.kind in STATE_KINDS

    @property
    def replica_shape(self) -> tuple[int, ...]:
        """Sizes of one replica's value."""
        return self.shape[1:] if self.lanes else self.shape

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Sizes of the tensor on the device, where the values of replicas form dimension 0."""
        return (self.replicas, *self.replica_shape) if self.replicas > 1 else self.shape

    def of(self, weight: Slot) -> Slot:
        """Return the same tensor of another weight: its gradient, this moment of it, ..."""
        return replace(self, weight=weight.weight, shape=weight.shape)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.key}: {dtype}[{', '.join(map(str, self.shape))}]"


def narrowed(dtype: torch.dtype) -> torch.dtype:
    """The 32-bit type that a 64-bit type becomes at the border; others stay."""
    return {torch.float64: torch.float32, torch.int64: torch.int32}.get(dtype, dtype)
