"""Gradients of micro-batches -> the descaled gradient of one update.

Between ``accumulate`` and ``finish`` the program sums ``accum.*`` over the replicas and processes
that hold accumulators of their own; every division is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.optim_spec import OptimSpec
from .._ir.slot import Slot
from .._ir.slot_function import SlotFunction
from .._ir.spec import Reduction
from ..enums import MeanReductionStrategy, ReductionType
from .algorithm import Scalar, is_constant, materialised, plus_scaled, storage_dtype
from .automatic_scaling import count_beyond, next_factor, tracked

_FACTOR, _BEYOND = slots.LOSS_SCALE_FACTOR.key, slots.BEYOND_EDGE.key
_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatches:
    """How many micro-batches meet where on the way to one update.

    Attributes:
        lanes: micro-batches whose gradients one ``gradient.*`` is already the sum of.
        chunks: accumulate steps per update; ``counter.micro`` counts them from 0.
        summed: accumulators that the program adds up before ``finish`` (replicas, processes).
        replicas: all data-parallel copies, whether they are lanes, chunks or summed.
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
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction:
    """Return the function that adds ``gradient.*`` into ``accum.*``.

    Strategy Running keeps the mean so far and reads ``counter.micro``, a 0-d float32 tensor: the
    number of gradients already in the accumulator.
    """
    accums = tuple(_accumulator(spec, slot) for slot in gradients)
    running = _is_running(spec, reduction)
    share_of_one, _ = _shares(spec, reduction, batches)
    watched = tracked(gradients, reduction)

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        results = {}
        kept, share = _weights(tensors, share_of_one) if running else (1.0, share_of_one)
        for gradient, accum in zip(gradients, accums, strict=True):
            wide = torch.promote_types(accum.dtype, torch.float32)
            old, new = tensors[accum.key].to(wide), tensors[gradient.key].to(wide)
            result = plus_scaled(_scaled(old, kept), new, share)
            results[accum.key] = result.to(accum.dtype)
        if watched:
            results[_BEYOND] = tensors[_BEYOND] + count_beyond(watched, tensors)
        return results

    outputs = (*accums, slots.BEYOND_EDGE) if watched else accums
    inputs = (*outputs, *gradients, *((slots.MICRO,) if running else ()))
    return SlotFunction("accumulate", function, inputs, outputs)


def hand_over(gradients: Sequence[Slot]) -> SlotFunction:
    """Return the function from ``gradient.*`` to ``accum.*`` of the same values.

    It stands for ``accumulate`` where processes add up what a single run makes.
    """
    pairs = [(slot, slots.accumulator(slot, slot.dtype)) for slot in gradients]

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        return {accum.key: tensors[gradient.key] for gradient, accum in pairs}

    accums = tuple(accum for _, accum in pairs)
    return SlotFunction("hand_over", function, (*accums, *gradients), accums)


def take_back(gradients: Sequence[Slot]) -> SlotFunction:
    """Return the function from ``accum.*``, added up meanwhile, to ``gradient.*``."""
    pairs = [(slot, slots.accumulator(slot, slot.dtype)) for slot in gradients]

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        return {gradient.key: tensors[accum.key] for gradient, accum in pairs}

    return SlotFunction("take_back", function, tuple(accum for _, accum in pairs), tuple(gradients))


def finish(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction:
    """Return the function from ``accum.*`` to the descaled ``gradient.*``, emptying ``accum.*``.

    The results have at least float32: un-scaling in half would lose what the scale protected.
    """
    pairs = [(_accumulator(spec, slot), _wide(slot)) for slot in gradients]
    watched = tracked(gradients, reduction)
    scaler = _Scaler(spec, _shares(spec, reduction, batches)[1], bool(watched))
    elements = sum(slot.numel for slot in watched) * batches.chunks * batches.summed

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        factor = scaler.factor(tensors)
        results = {}
        for accum, gradient in pairs:
            results[gradient.key] = _scaled(tensors[accum.key].to(gradient.dtype), factor)
            results[accum.key] = torch.zeros_like(tensors[accum.key])
        if watched:
            share = tensors[_BEYOND] / elements
            results[_FACTOR] = next_factor(tensors[_FACTOR], share)
            results[_BEYOND] = torch.zeros_like(tensors[_BEYOND])
        return results

    accums = (*(accum for accum, _ in pairs), *((slots.BEYOND_EDGE,) if watched else ()))
    outputs = (*(gradient for _, gradient in pairs), *accums, *scaler.state)
    return SlotFunction("finish", function, (*accums, *scaler.inputs), outputs, scaler.initial)


def scale(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction | None:
    """Return the function that stands for accumulate and finish when ``batches.chunks`` is 1.

    None when the gradients can be used as they are.
    """
    watched = tracked(gradients, reduction)
    divisor = float(batches.total) if reduction.type == ReductionType.Mean else 1.0
    scaler = _Scaler(spec, divisor, bool(watched))
    if scaler.is_identity:
        return None
    pairs = [(slot, _wide(slot)) for slot in gradients]
    elements = sum(slot.numel for slot in watched)

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        factor = scaler.factor(tensors)
        results = {new.key: _scaled(tensors[old.key].to(new.dtype), factor) for old, new in pairs}
        if watched:
            share = count_beyond(watched, tensors) / elements
            results[_FACTOR] = next_factor(tensors[_FACTOR], share)
        return results

    outputs = (*(new for _, new in pairs), *scaler.state)
    return SlotFunction("scale", function, (*gradients, *scaler.inputs), outputs, scaler.initial)


class _Scaler:
    """The one factor that turns a scaled sum into the descaled gradient."""

    def __init__(self, spec: OptimSpec, divisor: float, automatic: bool) -> None:
        self._variable = "loss_scaling" in spec.variables
        if not self._variable:
            divisor *= float(spec.setting("loss_scaling") or 1.0)
        self._divisor = divisor
        self.state = (slots.LOSS_SCALE_FACTOR,) if automatic else ()
        hyper = (slots.LOSS_SCALING,) if self._variable else ()
        self.inputs = (*self.state, *hyper)
        self.initial = {_FACTOR: 1.0} if automatic else {}

    @property
    def is_identity(self) -> bool:
        return not self.inputs and self._divisor == 1

    def factor(self, tensors: _Tensors) -> Scalar:
        divisor: Scalar = self._divisor
        for slot in self.inputs:
            divisor = tensors[slot.key] * divisor
        return materialised({"factor": 1 / divisor})["factor"]


def _weights(tensors: _Tensors, share_of_one: float) -> tuple[Scalar, Scalar]:
    """What the mean so far and the next gradient weigh in a running mean."""
    count = tensors[slots.MICRO.key] + 1
    weights = materialised({"kept": 1 - 1 / count, "share": share_of_one / count})
    return weights["kept"], weights["share"]


def _scaled(tensor: torch.Tensor, factor: Scalar) -> torch.Tensor:
    return tensor if is_constant(factor, 1) else tensor * factor


def _wide(slot: Slot) -> Slot:
    return slots.gradient(slot, torch.promote_types(slot.dtype, torch.float32))


def _accumulator(spec: OptimSpec, gradient: Slot) -> Slot:
    dtype = gradient.dtype
    if spec.algorithm != "sgd_combined" and dtype != torch.float64:
        dtype = storage_dtype(spec, "accum_type")
    return slots.accumulator(gradient, dtype)


def _shares(spec: OptimSpec, reduction: Reduction, batches: MicroBatches) -> tuple[float, float]:
    """Return what a gradient is multiplied by on its way in, and what the sum is divided by.

    With strategy Running the first is the share of a gradient in its own chunk, on top of the
    share that the chunk has in the running mean.
    """
    if reduction.type != ReductionType.Mean:
        return 1.0, 1.0
    if spec.algorithm == "sgd_combined":
        return 1 / batches.total, 1.0
    if reduction.strategy == MeanReductionStrategy.Running:
        return 1 / batches.lanes, float(batches.summed)
    if reduction.strategy == MeanReductionStrategy.PostAndLoss:
        return 1 / batches.replicas, batches.total / batches.replicas
    return 1.0, float(batches.total)


def _is_running(spec: OptimSpec, reduction: Reduction) -> bool:
    mean = reduction.type == ReductionType.Mean
    running = reduction.strategy == MeanReductionStrategy.Running
    return mean and running and spec.algorithm != "sgd_combined"
