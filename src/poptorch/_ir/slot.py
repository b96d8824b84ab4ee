"""What one flat tensor of a graph is: kind, path, shape, dtype. Frozen, hashable, printable."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

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
        path: a name unique within the kind, for instance ``fc1.weight`` or ``momentum.fc1.weight``.
        shape: sizes; for batch inputs, losses and outputs those of one micro-batch.
        dtype: the element type inside the program.
    """

    kind: Kind
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """``kind.path``: what State, Programs and pieces call this tensor."""
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

    @staticmethod
    def like(kind: Kind, path: str, tensor: torch.Tensor) -> Slot:
        """Make a slot with the shape and dtype of a tensor."""
        return Slot(kind, path, tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.key}: {dtype}[{', '.join(map(str, self.shape))}]"
