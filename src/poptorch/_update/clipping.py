"""Gradients clipped by the norm of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .formulas import as_real

Tensors = Mapping[str, Tensor]


def sums_of_squares(keys: Iterable[str], tensors: Tensors) -> list[Tensor]:
    gradients = [as_real(tensors[key]) for key in keys]
    return [(each * each).sum() for each in gradients]


def clip_factor(
    spec: OptimSpec, terms: Sequence[Tensor], norms: Sequence[Slot]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what gradients are multiplied by, and the values of ``norms``, from their squares."""
    norm, limit = torch.sqrt(torch.stack([*terms]).sum()), spec.max_grad_norm
    largest = norm.clamp(min=max(limit, torch.finfo(torch.float32).tiny))
    factor = (limit / largest).as_strided((), ())
    return factor, {slot.key: norm.to(slot.dtype).as_strided((), ()) for slot in norms}


def clipped(
    spec: OptimSpec, keys: Sequence[str], tensors: Tensors, norms: Sequence[Slot]
) -> tuple[dict[str, Tensor], Tensors]:
    """Return the values of ``norms``, and tensors among which these gradients are clipped."""
    if not spec.clips or not keys:
        return {}, tensors
    factor, measured = clip_factor(spec, sums_of_squares(keys, tensors), norms)
    return measured, {**tensors, **{key: tensors[key] * factor for key in keys}}
