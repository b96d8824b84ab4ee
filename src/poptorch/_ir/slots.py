"""What the tensors at a graph's borders are, and what they belong to; made in one place.

A slot's key names it and is never taken apart to learn something.
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
DECAY_RATES = frozenset({"alpha", "beta1", "beta2"})
NORM = "GradientNorm"
"""The name to anchor for the norm of all gradients, before they are clipped by it."""


@dataclass(frozen=True)
class Slot:
    """One named tensor at the border of a graph.

    Attributes:
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
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
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

    @property
    def type_text(self) -> str:
        """``float32[4, 20]``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.key}: {self.type_text}"


def narrowed(dtype: torch.dtype) -> torch.dtype:
    return {torch.float64: torch.float32, torch.int64: torch.int32}.get(dtype, dtype)


def param(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(Kind.PARAM, shape, dtype, weight=path)


def buffer(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(Kind.BUFFER, shape, dtype, path)


def gradient(weight: Slot, dtype: torch.dtype | None = None) -> Slot:
    """Return the gradient of a parameter, in its dtype unless another is given."""
    return Slot(Kind.GRADIENT, weight.shape, dtype or weight.dtype, weight=weight.weight)


def accumulator(weight: Slot, dtype: torch.dtype) -> Slot:
    """Return what sums the gradients of a parameter during one update."""
    return Slot(Kind.ACCUM, weight.shape, dtype, weight=weight.weight)


def exchanged(index: int, size: int, dtype: torch.dtype) -> Slot:
    """Return the flat tensor in which sums of gradients lie that processes add up at once."""
    return Slot(Kind.ACCUM, (size,), dtype, "~bucket", index=index)


def squares(count: int, dtype: torch.dtype) -> Slot:
    """Return sums of squares of weights in parts, which processes add up before an update."""
    return Slot(Kind.ACCUM, (count,), dtype, "~squares")


def moment(name: str, weight: Slot, dtype: torch.dtype) -> Slot:
    """Return state that an optimizer keeps for a parameter, for instance its ``velocity``."""
    return Slot(Kind.OPTSTATE, weight.shape, dtype, name, weight.weight)


def hyper(name: str, group: int = -1) -> Slot:
    """Return a variable hyper-parameter of a parameter group, or of the whole optimizer.

    Decay rates near 1 are handed over as their complement, which float32 holds precisely.
    """
    name = f"one_minus_{name}" if name in DECAY_RATES else name
    return Slot(Kind.HYPER, (), torch.float32, name, index=group)


def hyper_value(name: str, value: float) -> float:
    """Return what the slot of a hyper-parameter holds for a value of it, and the reverse."""
    return 1 - value if name in DECAY_RATES else value


def batch_input(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return one flat tensor argument, as one micro-batch has it."""
    return Slot(Kind.BATCH, shape, dtype, index=index)


def result(index: int, tensor: torch.Tensor, is_loss: bool = False, lanes: bool = False) -> Slot:
    """Return one flat tensor that forward returns: the loss, or another output."""
    kind = Kind.LOSS if is_loss else Kind.OUTPUT
    return Slot(kind, tuple(tensor.shape), tensor.dtype, index=index, lanes=lanes)


def constant(index: int, tensor: torch.Tensor) -> Slot:
    return Slot(Kind.CONSTANT, tuple(tensor.shape), tensor.dtype, index=index)


def anchor(name: str, shape: tuple[int, ...], dtype: torch.dtype, lanes: bool = False) -> Slot:
    """Return a tensor inside the program that the user asked for by this name."""
    return Slot(Kind.ANCHOR, shape, dtype, name, lanes=lanes)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return what one part of a cut program hands to another."""
    return Slot(Kind.VALUE, shape, dtype, name)


STEP = Slot(Kind.OPTSTATE, (), torch.float32, "step")
"""Updates made so far."""
LOSS_SCALE_FACTOR = Slot(Kind.OPTSTATE, (), torch.float32, "loss_scale_factor")
"""What automatic loss scaling multiplies the loss scale by."""
BEYOND_EDGE = Slot(Kind.ACCUM, (), torch.float32, "~beyond_edge")
"""How many elements of this update's gradients were close to overflow so far."""
ROUNDING = Slot(Kind.RNG, (), torch.int64, "rounding")
"""What rounding at random in updates depends on: starts at the seed, one more per update."""
MICRO = Slot(Kind.COUNTER, (), torch.float32, "micro")
"""Micro-batches, or chunks of lanes, that this update accumulated before."""
REPLICA = Slot(Kind.COUNTER, (), torch.float32, "replica")
"""Which replica runs."""
LOSS_SCALING = hyper("loss_scaling")
