"""Turn gradients of micro-batches into the gradient of one update: sum or mean, loss scaling.
Adapts the loss scale.

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
from .._ir.tensors import TensorsByKey
from .._ops.optimizer_formulas import Scalar, plus_scaled, scaled
from ..enums import MeanReductionStrategy, ReductionType
from .per_group import (
    compute_dtype,
    kept_dtype,
    materialised,
    storage_dtype,
)

_EDGE = 0.125 * torch.finfo(torch.float16).max
_THRESHOLD = 1e-7
_LIMITS = (2.0**-24, 2.0**24)
_FACTOR, _BEYOND = slots.LOSS_SCALE_FACTOR.key, slots.BEYOND_EDGE.key


@dataclass(frozen=True)
class Accumulation:
    """How the gradients of micro-batches become those of one update."""

    optim: OptimSpec
    reduction: Reduction
    lanes: int = 1  # number of lanes whose gradients are already summed in one ``gradient.*``
    chunks: int = 1  # calls of accumulate per update; ``counter.micro`` counts them from 0
    # number of accumulators (replicas, processes) that are summed before ``finish``
    summed: int = 1
    replicas: int = 1  # all data-parallel copies, whether they are lanes, chunks or summed

    @property
    def total(self) -> int:
        return self.lanes * self.chunks * self.summed

    def accumulate(self, gradients: Sequence[Slot]) -> SlotFunction:
        """Add gradients to the accumulators. With Running, these hold the mean so far, over
        ``counter.micro`` gradients.
        """
        accums = tuple(map(self._accumulator, gradients))
        running = (
            self.reduction.type == ReductionType.Mean
            and self.reduction.strategy == MeanReductionStrategy.Running
            and self.optim.algorithm != "sgd_combined"
        )
        share_of_one, _ = self._shares
        watched = self._watched(gradients)

        def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
            results = {}
            weights: Mapping[str, Scalar] = {"kept": 1.0, "share": share_of_one}
            if running:
                wide = any(accum.dtype.to_real() is torch.float64 for accum in accums)
                count = tensors[slots.MICRO.key].to(torch.float64 if wide else torch.float32) + 1
                weights = materialised({"kept": 1 - 1 / count, "share": share_of_one / count})
            for gradient, accum in zip(gradients, accums, strict=True):
                own = compute_dtype(accum.dtype)
                old, new = tensors[accum.key].to(own), tensors[gradient.key].to(own)
                result = plus_scaled(scaled(old, weights["kept"]), new, weights["share"])
                results[accum.key] = result.to(accum.dtype)
            if watched:
                results[_BEYOND] = tensors[_BEYOND] + _count_beyond(watched, tensors)
            return results

        outputs = (*accums, slots.BEYOND_EDGE) if watched else accums
        inputs = (*outputs, *gradients, *((slots.MICRO,) if running else ()))
        return SlotFunction("accumulate", function, inputs, outputs)

    def finish(self, gradients: Sequence[Slot]) -> SlotFunction:
        counted = self.chunks * self.summed
        accums = [self._accumulator(slot) for slot in gradients]
        return self._descaling(accums, gradients, self._shares[1], counted)

    def hand_over(self, gradients: Sequence[Slot]) -> SlotFunction:
        """Replace ``accumulate`` if processes sum the gradients of a single run."""
        pairs = [(slot, self._exchanged(slot)) for slot in gradients]
        accums = tuple(accum for _, accum in pairs)

        def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
            return {accum.key: tensors[slot.key].to(accum.dtype) for slot, accum in pairs}

        return SlotFunction("hand_over", function, (*accums, *gradients), accums)

    def _exchanged(self, gradient: Slot) -> Slot:
        """Return a gradient for the exchange. Sums of half gradients may overflow, which an
        adaptive scale must see.
        """
        adapts = self.reduction.automatic_loss_scaling
        wide = gradient.dtype is torch.float16 and not adapts
        return slots.accumulator(gradient, torch.float32 if wide else gradient.dtype)

    def take_back(self, gradients: Sequence[Slot]) -> SlotFunction:
        """Replace ``finish`` after ``hand_over``."""
        accums = [self._exchanged(slot) for slot in gradients]
        return self._descaling(accums, gradients, self._parts)

    def scale(self, gradients: Sequence[Slot]) -> SlotFunction:
        """Accumulate and finish in one step, if ``chunks`` is 1."""
        return self._descaling(gradients, gradients, self._parts)

    def _descaling(
        self, sources: Sequence[Slot], gradients: Sequence[Slot], divisor: float, counted: int = 0
    ) -> SlotFunction:
        """Return the descaled gradients.

        ``counted``: gradients that ``beyond`` has seen; their sources are emptied afterwards. The
        results have at least float32, because descaling in a half type would lose what the scale
        protects.
        """
        pairs = [
            (source, slots.gradient(slot, compute_dtype(slot.dtype)))
            for source, slot in zip(sources, gradients, strict=True)
        ]
        watched = self._watched(gradients if counted else sources)
        elements = sum(slot.numel for slot in watched) * (counted or 1)
        factors = self._factors(watched)

        def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
            scaling: Scalar = divisor * self.optim.loss_scaling
            for slot in factors:
                scaling = tensors[slot.key] * scaling
            factor = materialised({"factor": 1 / scaling})["factor"]
            results = {n.key: scaled(tensors[old.key].to(n.dtype), factor) for old, n in pairs}
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

    def _factors(self, watched: Sequence[Slot]) -> tuple[Slot, ...]:
        hyper = (slots.LOSS_SCALING,) if "loss_scaling" in self.optim.variables else ()
        return (*((slots.LOSS_SCALE_FACTOR,) if watched else ()), *hyper)

    def _accumulator(self, gradient: Slot) -> Slot:
        if self.optim.algorithm == "sgd_combined":
            return slots.accumulator(gradient, gradient.dtype)
        named = storage_dtype(dict(self.optim.settings), "accum_type")
        return slots.accumulator(gradient, kept_dtype(gradient.dtype, named))

    @property
    def _parts(self) -> float:
        return float(self.total) if self.reduction.type == ReductionType.Mean else 1.0

    @property
    def _shares(self) -> tuple[float, float]:
        """Return the factor of an incoming gradient, and the divisor of the sum.

        With Running, a gradient has a factor within its chunk, and the chunk has one in the running
        mean.
        """
        if self.reduction.type != ReductionType.Mean:
            return 1.0, 1.0
        if self.optim.algorithm == "sgd_combined":
            return 1 / self.total, 1.0
        if self.reduction.strategy == MeanReductionStrategy.Running:
            return 1 / self.lanes, float(self.summed)
        if self.reduction.strategy == MeanReductionStrategy.PostAndLoss:
            return 1 / self.replicas, self.total / self.replicas
        return 1.0, float(self.total)

    def _watched(self, gradients: Sequence[Slot]) -> tuple[Slot, ...]:
        """Return the values that decide about the automatic loss scale (user guide,
        "Optimizers").
        """
        if not self.reduction.automatic_loss_scaling:
            return ()
        return tuple(slot for slot in gradients if slot.dtype == torch.float16)


def _count_beyond(gradients: Sequence[Slot], tensors: TensorsByKey) -> torch.Tensor:
    """Count values beyond the limit, including infinities and NaNs."""
    within = [(tensors[slot.key].abs() <= _EDGE).sum(dtype=torch.float32) for slot in gradients]
    return sum(slot.numel for slot in gradients) - torch.stack(within).sum()
