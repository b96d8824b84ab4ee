"""Automatic loss scaling: a factor that follows how close half gradients come to overflow.

Source: PopTorch user guide, "Optimizers". The backward pass is seeded with ``loss_scaling`` times
the factor. After every update the share of half gradient elements beyond an eighth of the largest
half number decides whether the factor is halved or doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._ir.slot import Slot
from .._ir.spec import Reduction

EDGE = 0.125 * torch.finfo(torch.float16).max
THRESHOLD = 1e-7
LIMITS = (2.0**-24, 2.0**24)


def tracked(gradients: Sequence[Slot], reduction: Reduction) -> tuple[Slot, ...]:
    """Return the gradients that decide about the factor; none if there is no factor."""
    if not reduction.automatic_loss_scaling:
        return ()
    return tuple(slot for slot in gradients if slot.dtype == torch.float16)


def count_beyond(gradients: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return how many elements lie beyond the edge, infinities and NaNs included."""
    within = [(tensors[slot.key].abs() <= EDGE).sum(dtype=torch.float32) for slot in gradients]
    return sum(slot.numel for slot in gradients) - torch.stack(within).sum()


def next_factor(factor: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the factor of the next update from the share of elements beyond the edge."""
    return torch.where(share > THRESHOLD, factor / 2, factor * 2).clamp(*LIMITS)
