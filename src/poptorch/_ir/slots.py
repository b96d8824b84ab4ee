"""Every slot there is, made in one place."""

from __future__ import annotations

import torch

from .slot import Kind, Slot

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
NORM = "GradientNorm"
"""The name to anchor for the norm of all gradients, before they are clipped by it."""


DECAY_RATES = frozenset({"alpha", "beta1", "beta2"})


def param(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return a parameter."""
    return Slot(Kind.PARAM, shape, dtype, weight=path)


def buffer(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return a buffer."""
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
    """Return the sums of squares of weights in parts, which processes add up before an update."""
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
    """Return a tensor that the module holds outside parameters and buffers."""
    return Slot(Kind.CONSTANT, tuple(tensor.shape), tensor.dtype, index=index)


def anchor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return a tensor inside the program that the user asked for by this name."""
    return Slot(Kind.ANCHOR, shape, dtype, name)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    """Return what one part of a cut program hands to another."""
    return Slot(Kind.VALUE, shape, dtype, name)


LOSS_SCALING = hyper("loss_scaling")
