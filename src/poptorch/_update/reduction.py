"""Gradients of micro-batches -> the descaled gradient of one update, and automatic loss scaling.

Between ``accumulate`` and ``finish`` the program sums ``accum.*`` over replicas and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.graph import SlotFunction
from .._ir.slots import Slot
from .._ir.spec import OptimSpec, Reduction
from ..enums import MeanReductionStrategy, ReductionType
from .formulas import Scalar, is_constant, materialised, plus_scaled, storage_dtype

_EDGE = 0.125 * torch.finfo(torch.float16).max
_THRESHOLD = 1e-7
_LIMITS = (2.0**-24, 2.0**24)
_FACTOR, _BEYOND = slots.LOSS_SCALE_FACTOR.key, slots.BEYOND_EDGE.key
_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatches:
    """How many micro-batches meet where on the way to one update."""

    lanes: int = 1  # whose gradients one ``gradient.*`` is already the sum of
    chunks: int = 1  # accumulate steps per update; ``counter.micro`` counts them from 0
    summed: int = 1  # accumulators that are added up before ``finish`` (replicas, processes)
    replicas: int = 1  # all data-parallel copies, whether they are lanes, chunks or summed

    @property
    def total(self) -> int:
        return self.lanes * self.chunks * self.summed


def accumulate(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction:
    """Running keeps the mean so far and reads ``counter.micro``: the number of gradients in it."""
    accums = tuple(_accumulator(spec, slot) for slot in gradients)
    running = (
        reduction.type == ReductionType.Mean
        and reduction.strategy == MeanReductionStrategy.Running
        and spec.algorithm != "sgd_combined"
    )
    share_of_one, _ = _shares(spec, reduction, batches)
    watched = _watched(gradients, reduction)

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        results = {}
        weights: Mapping[str, Scalar] = {"kept": 1.0, "share": share_of_one}
        if running:
            count = tensors[slots.MICRO.key] + 1
            weights = materialised({"kept": 1 - 1 / count, "share": share_of_one / count})
        for gradient, accum in zip(gradients, accums, strict=True):
            wide = torch.promote_types(accum.dtype, torch.float32)
            old, new = tensors[accum.key].to(wide), tensors[gradient.key].to(wide)
            result = plus_scaled(_scaled(old, weights["kept"]), new, weights["share"])
            results[accum.key] = result.to(accum.dtype)
        if watched:
            results[_BEYOND] = tensors[_BEYOND] + _count_beyond(watched, tensors)
        return results

    outputs = (*accums, slots.BEYOND_EDGE) if watched else accums
    inputs = (*outputs, *gradients, *((slots.MICRO,) if running else ()))
    return SlotFunction("accumulate", function, inputs, outputs)


def hand_over(gradients: Sequence[Slot]) -> SlotFunction:
    """Stand for ``accumulate`` where processes add up what a single run makes."""
    pairs = [(slot, slots.accumulator(slot, slot.dtype)) for slot in gradients]
    accums = tuple(accum for _, accum in pairs)

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        return {accum.key: tensors[slot.key] for slot, accum in pairs}

    return SlotFunction("hand_over", function, (*accums, *gradients), accums)


def take_back(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction:
    """Stand for ``finish`` after ``hand_over``."""
    accums = [slots.accumulator(slot, slot.dtype) for slot in gradients]
    return _descaling(spec, accums, gradients, reduction, _whole(reduction, batches))


def finish(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction:
    """The results have at least float32: un-scaling in half would lose what the scale protected."""
    accums = [_accumulator(spec, slot) for slot in gradients]
    divisor = _shares(spec, reduction, batches)[1]
    counted = batches.chunks * batches.summed
    return _descaling(spec, accums, gradients, reduction, divisor, counted)


def scale(
    spec: OptimSpec, gradients: Sequence[Slot], reduction: Reduction, batches: MicroBatches
) -> SlotFunction | None:
    """Accumulate and finish in one, for ``batches.chunks`` of 1; None if there is nothing to do."""
    divisor = _whole(reduction, batches)
    if _divisor(spec, divisor) == 1 and not _factors(spec, _watched(gradients, reduction)):
        return None
    return _descaling(spec, gradients, gradients, reduction, divisor)


def _whole(reduction: Reduction, batches: MicroBatches) -> float:
    return float(batches.total) if reduction.type == ReductionType.Mean else 1.0


def _descaling(
    spec: OptimSpec,
    sources: Sequence[Slot],
    gradients: Sequence[Slot],
    reduction: Reduction,
    divisor: float,
    counted: int = 0,
) -> SlotFunction:
    """``counted``: gradients that ``beyond`` has seen, of sources that are emptied afterwards."""
    pairs = [
        (source, slots.gradient(slot, torch.promote_types(slot.dtype, torch.float32)))
        for source, slot in zip(sources, gradients, strict=True)
    ]
    watched = _watched(gradients if counted else sources, reduction)
    elements = sum(slot.numel for slot in watched) * (counted or 1)
    factors = _factors(spec, watched)

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        scaling: Scalar = _divisor(spec, divisor)
        for slot in factors:
            scaling = tensors[slot.key] * scaling
        factor = materialised({"factor": 1 / scaling})["factor"]
        results = {new.key: _scaled(tensors[old.key].to(new.dtype), factor) for old, new in pairs}
        if watched:
            beyond = tensors[_BEYOND] if counted else _count_beyond(watched, tensors)
            halves, before = beyond / elements > _THRESHOLD, tensors[_FACTOR]
            results[_FACTOR] = torch.where(halves, before / 2, before * 2).clamp(*_LIMITS)
        if counted:
            results |= {slot.key: torch.zeros_like(tensors[slot.key]) for slot in emptied}
        return results

    emptied = (*sources, *((slots.BEYOND_EDGE,) if watched else ())) if counted else ()
    state = (slots.LOSS_SCALE_FACTOR,) if watched else ()
    outputs = (*(new for _, new in pairs), *emptied, *state)
    inputs = (*(emptied or sources), *factors)
    initial = {_FACTOR: 1.0} if watched else {}
    return SlotFunction("descale", function, inputs, outputs, initial)


def _factors(spec: OptimSpec, watched: Sequence[Slot]) -> tuple[Slot, ...]:
    hyper = (slots.LOSS_SCALING,) if "loss_scaling" in spec.variables else ()
    return (*((slots.LOSS_SCALE_FACTOR,) if watched else ()), *hyper)


def _divisor(spec: OptimSpec, divisor: float) -> float:
    constant = "loss_scaling" not in spec.variables
    return divisor * float(spec.setting("loss_scaling") or 1.0) if constant else divisor


def _scaled(tensor: torch.Tensor, factor: Scalar) -> torch.Tensor:
    return tensor if is_constant(factor, 1) else tensor * factor


def _accumulator(spec: OptimSpec, gradient: Slot) -> Slot:
    dtype = gradient.dtype
    if spec.algorithm != "sgd_combined" and dtype != torch.float64:
        dtype = storage_dtype(dict(spec.settings), "accum_type")
    return slots.accumulator(gradient, dtype)


def _shares(spec: OptimSpec, reduction: Reduction, batches: MicroBatches) -> tuple[float, float]:
    """Return what a gradient is multiplied by on its way in, and what the sum is divided by.

    With Running the first is its share in its own chunk, beside the chunk's in the running mean.
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


def _watched(gradients: Sequence[Slot], reduction: Reduction) -> tuple[Slot, ...]:
    """Return what decides about the automatic loss scale (PopTorch user guide, "Optimizers")."""
    if not reduction.automatic_loss_scaling:
        return ()
    return tuple(slot for slot in gradients if slot.dtype == torch.float16)


def _count_beyond(gradients: Sequence[Slot], tensors: _Tensors) -> torch.Tensor:
    """Count infinities and NaNs, too."""
    within = [(tensors[slot.key].abs() <= _EDGE).sum(dtype=torch.float32) for slot in gradients]
    return sum(slot.numel for slot in gradients) - torch.stack(within).sum()
