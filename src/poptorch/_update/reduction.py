"""Gradients of micro-batches -> the descaled gradient of one update (spec/optimizers.md 5.8 and 6).

Between ``accumulate`` and ``finish`` the program sums ``accum.*`` over the replicas and processes
that hold accumulators of their own; every division is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir.optim_spec import OptimSpec
from .._ir.piece import Piece
from .._ir.slot import Kind, Slot
from .._ir.spec import Reduction
from ..enums import MeanReductionStrategy, ReductionType
from .algorithm import Value, storage_dtype
from .lower import hyper_slot

MICRO = Slot(Kind.COUNTER, "micro", (), torch.float32)


@dataclass(frozen=True)
class Tally:
    """How many micro-batches meet where on the way to one update.

    Attributes:
        lanes: micro-batches whose gradients one ``gradient.*`` is already the sum of.
        chunks: accumulate steps per update; ``counter.micro`` counts them from 0.
        summed: accumulators that the program adds up before ``finish`` (replicas, processes).
        replicas: all data-parallel copies, whether lanes or summed.
    """

    lanes: int = 1
    chunks: int = 1
    summed: int = 1
    replicas: int = 1

    @property
    def total(self) -> int:
        """Micro-batches per update over all replicas."""
        return self.lanes * self.chunks * self.summed


def accumulate(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, tally: Tally
) -> Piece:
    """Return the piece that adds ``gradient.*`` into ``accum.*``.

    Strategy Running keeps the mean so far and reads ``counter.micro``, a 0-d float32 tensor: the
    number of gradients already in the accumulator.
    """
    accums = tuple(accumulator(spec, g) for g in gradients)
    running = is_running(spec, reduction)
    weight, _ = shares(spec, reduction, tally)

    def function(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = {}
        if running:
            kept = tensors[MICRO.key] / (tensors[MICRO.key] + 1)
            share = weight / (tensors[MICRO.key] + 1)
        for gradient, accum in zip(gradients, accums, strict=True):
            wide = torch.promote_types(accum.dtype, torch.float32)
            old, new = tensors[accum.key].to(wide), tensors[gradient.key].to(wide)
            if running:
                result = torch.addcmul(old * kept, new, share)
            else:
                result = torch.add(old, new, alpha=weight)
            results[accum.key] = result.to(accum.dtype)
        return results

    inputs = (*accums, *gradients, *((MICRO,) if running else ()))
    return Piece("accumulate", function, inputs, accums)


def finish(spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, tally: Tally) -> Piece:
    """Return the piece from ``accum.*`` to the descaled ``gradient.*``, emptying ``accum.*``.

    The results have at least float32: un-scaling in half would lose what the scale protected.
    """
    pairs = [(accumulator(spec, g), _wide(g)) for g in gradients]
    scaler = _Scaler(spec, shares(spec, reduction, tally)[1])

    def function(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        factor = scaler.factor(tensors)
        results = {}
        for accum, gradient in pairs:
            results[gradient.key] = _scaled(tensors[accum.key].to(gradient.dtype), factor)
            results[accum.key] = torch.zeros_like(tensors[accum.key])
        return results

    accums = tuple(accum for accum, _ in pairs)
    outputs = (*(gradient for _, gradient in pairs), *accums)
    return Piece("finish", function, (*accums, *scaler.inputs), outputs)


def scale(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, tally: Tally
) -> Piece | None:
    """Return the piece that stands for accumulate and finish when ``tally.chunks`` is 1.

    None when the gradients can be used as they are.
    """
    mean = reduction.type == ReductionType.Mean
    scaler = _Scaler(spec, float(tally.total) if mean else 1.0)
    if scaler.is_identity:
        return None
    pairs = [(g, _wide(g)) for g in gradients]

    def function(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        factor = scaler.factor(tensors)
        return {new.key: _scaled(tensors[old.key].to(new.dtype), factor) for old, new in pairs}

    return Piece("scale", function, (*gradients, *scaler.inputs), tuple(new for _, new in pairs))


class _Scaler:
    """The one factor that turns a scaled sum into the descaled gradient."""

    def __init__(self, spec: OptimSpec, divisor: float) -> None:
        self._variable = "loss_scaling" in spec.variables
        if not self._variable:
            divisor *= float(spec.setting("loss_scaling") or 1.0)
        self._constant = 1 / divisor
        self.inputs = (hyper_slot("loss_scaling"),) if self._variable else ()

    @property
    def is_identity(self) -> bool:
        return not self._variable and self._constant == 1

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> Value:
        if self._variable:
            return self._constant / tensors[f"{Kind.HYPER}.loss_scaling"]
        return self._constant


def _scaled(tensor: torch.Tensor, factor: Value) -> torch.Tensor:
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return tensor.clone()
    return tensor * factor


def _wide(slot: Slot) -> Slot:
    return Slot(slot.kind, slot.path, slot.shape, torch.promote_types(slot.dtype, torch.float32))


def accumulator(spec: OptimSpec, gradient: Slot) -> Slot:
    """Return the slot in which the gradients of one weight are summed."""
    dtype = gradient.dtype
    if spec.algorithm != "sgd_combined" and dtype != torch.float64:
        dtype = storage_dtype(spec, "accum_type")
    return Slot(Kind.ACCUM, gradient.path, gradient.shape, dtype)


def shares(spec: OptimSpec, reduction: Reduction, tally: Tally) -> tuple[float, float]:
    """Return what a gradient is multiplied by on its way in, and what the sum is divided by.

    With strategy Running the first is the share of a gradient in its own chunk, on top of the
    share that the chunk has in the running mean.
    """
    if reduction.type != ReductionType.Mean:
        return 1.0, 1.0
    if spec.algorithm == "sgd_combined":
        return 1 / tally.total, 1.0
    if reduction.strategy == MeanReductionStrategy.Running:
        return 1 / tally.lanes, float(tally.summed)
    if reduction.strategy == MeanReductionStrategy.PostAndLoss:
        return 1 / tally.replicas, tally.total / tally.replicas
    return 1.0, float(tally.total)


def is_running(spec: OptimSpec, reduction: Reduction) -> bool:
    """Tell whether accumulators hold the mean so far."""
    mean = reduction.type == ReductionType.Mean
    running = reduction.strategy == MeanReductionStrategy.Running
    return mean and running and spec.algorithm != "sgd_combined"
