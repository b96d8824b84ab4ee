"""Clip gradients by the norm of all of them, and return anchored norms and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .._ir.tensors import TensorsByKey
from .per_group import as_real


def sums_of_squares(keys: Iterable[str], tensors: TensorsByKey) -> list[Tensor]:
    gradients = [as_real(tensors[key]) for key in keys]
    return [(each * each).sum() for each in gradients]


@dataclass(frozen=True)
class Anchor:
    """An anchor for the norm of all gradients, or for the gradient of one weight."""

    slot: Slot
    path: str = ""


def clip_factor(
    spec: OptimSpec, terms: Sequence[Tensor], anchors: Sequence[Anchor]
) -> tuple[Tensor | float, dict[str, Tensor]]:
    """Return the factor for all gradients, and the anchored norms, from their sums of squares."""
    norms = [each.slot for each in anchors if not each.path]
    if not (spec.clips or norms):
        return 1.0, {}
    norm, limit = torch.sqrt(torch.stack([*terms]).sum()), spec.max_grad_norm
    measured = {slot.key: norm.to(slot.dtype).as_strided((), ()) for slot in norms}
    if not spec.clips:
        return 1.0, measured
    largest = norm.clamp(min=max(limit, torch.finfo(torch.float32).tiny))
    factor = (limit / largest).as_strided((), ())
    return factor, measured


def gradients_of(
    keys: Mapping[str, str], tensors: TensorsByKey, anchors: Sequence[Anchor]
) -> dict[str, Tensor]:
    """Return the anchored gradients of weights; ``keys``: of gradients, by path."""
    own = [each for each in anchors if each.path]
    return {each.slot.key: tensors[keys[each.path]].to(each.slot.dtype).clone() for each in own}


def clipped(
    spec: OptimSpec, keys: Mapping[str, str], tensors: TensorsByKey, anchors: Sequence[Anchor]
) -> tuple[dict[str, Tensor], TensorsByKey]:
    """Return the anchored values, and the tensors with these gradients clipped."""
    if not keys or not (spec.clips or anchors):
        return {}, tensors
    factor, measured = clip_factor(spec, sums_of_squares(keys.values(), tensors), anchors)
    measured |= gradients_of(keys, tensors, anchors)
    if not spec.clips:
        return measured, tensors
    return measured, {**tensors, **{key: tensors[key] * factor for key in keys.values()}}
