"""Norms of gradients and weights, also where a process has only parts of them.

The squares of its parts are added up over the processes before the update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.optim_spec import OptimSpec
from .._ir.slot import Slot
from .._ir.slot_function import SlotFunction
from .algorithm import SQUARES, Scalar, Scalars
from .grouped import Group, Weight, groups_of

_TINY = torch.finfo(torch.float32).tiny
_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Squares:
    """Which sums of squares an update needs of weights in parts.

    Attributes:
        slot: what holds them: one of all gradients if these are clipped, or those of each weight.
        places: by path of a weight in parts, where its own begin; none where gradients are clipped.
        in_parts: the paths of all weights in parts.
    """

    slot: Slot
    places: Mapping[str, int]
    in_parts: frozenset[str]

    @classmethod
    def of(
        cls, spec: OptimSpec, groups: Sequence[Group], in_parts: Collection[str]
    ) -> Squares | None:
        """Return what an update needs; None if nothing."""
        weights = [(g, w) for g in groups for w in g.weights if w.slot.path in in_parts]
        measured = [w.slot.path for group, w in weights if group.algorithm.squares is not None]
        if not weights or not (spec.clips or measured):
            return None
        assert not (spec.clips and measured), "what is clipped by a norm has none of its own"
        count = 1 if spec.clips else len(measured) * SQUARES
        wide = any(weight.compute_dtype == torch.float64 for _, weight in weights)
        slot = slots.squares(count, torch.float64 if wide else torch.float32)
        places = {path: at * SQUARES for at, path in enumerate(measured)}
        return cls(slot, places, frozenset(w.slot.path for _, w in weights))

    def with_those_of(self, weight: Weight, values: Scalars, tensors: _Tensors) -> Scalars:
        """Return the values of a step, with the squares of the whole weight if it needs them."""
        at = self.places.get(weight.slot.path)
        if at is None:
            return values
        own = tensors[self.slot.key][at : at + SQUARES].to(weight.compute_dtype)
        return {**values, **{f"square_{i}": own[i] for i in range(SQUARES)}}


def own_squares(
    spec: OptimSpec,
    params: Sequence[Slot],
    gradient_dtype: torch.dtype | None,
    in_parts: Collection[str],
) -> SlotFunction | None:
    """Return the function to the squares of this process's parts; None if the update needs none.

    Args:
        spec, gradient_dtype, in_parts: as of ``lower``.
        params: the weights in parts; others do not matter.
    """
    groups = groups_of(spec, params, gradient_dtype)
    squares = Squares.of(spec, groups, in_parts)
    if squares is None:
        return None
    made = squares

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        sums: list[torch.Tensor] = []
        if not made.places:
            sums.append(_sum_of_squares(groups, tensors, made.in_parts))
        for group in groups:
            measure = group.algorithm.squares
            if measure is not None:
                for _, step in group.steps(spec, 1.0, tensors):
                    sums += measure(*step)
        return {made.slot.key: torch.stack([each.to(made.slot.dtype) for each in sums])}

    weights = [weight for group in groups for weight in group.weights]
    inputs: list[Slot] = [made.slot, *(weight.gradient for weight in weights)]
    if made.places:
        inputs += [s for w in weights for s in (w.slot, *(slot for _, slot in w.moments))]
        inputs += [slots.STEP] if any(group.counts for group in groups) else []
        hypers = {slot.key: slot for g in groups if g.weights for slot in g.variables}
        inputs += [hypers[key] for key in sorted(hypers)]
    return SlotFunction("squares", function, tuple(inputs), (made.slot,))


def clip_factor(spec: OptimSpec, norm: torch.Tensor | None) -> Scalar:
    """Return what scales all gradients so that their global norm stays within the limit."""
    if norm is None:
        return 1.0
    limit = spec.max_grad_norm
    return (limit / norm.clamp(min=max(limit, _TINY))).as_strided((), ())


def gradient_norm(
    spec: OptimSpec, groups: Sequence[Group], tensors: _Tensors, squares: Squares | None
) -> torch.Tensor | None:
    """Return the global norm of the gradients; None where they are not clipped by it."""
    if not spec.clips or not any(group.weights for group in groups):
        return None
    if squares is None:
        square = _sum_of_squares(groups, tensors)
    else:
        here = {w.slot.path for group in groups for w in group.weights} - squares.in_parts
        square = tensors[squares.slot.key][0]
        if here:
            square = square + _sum_of_squares(groups, tensors, here)
    return torch.sqrt(square)


def _sum_of_squares(
    groups: Sequence[Group], tensors: _Tensors, paths: Collection[str] | None = None
) -> torch.Tensor:
    """Of the gradients of the weights with these paths; of all for None."""
    weights = [
        w for group in groups for w in group.weights if paths is None or w.slot.path in paths
    ]
    gradients = [tensors[w.gradient.key].to(w.compute_dtype) for w in weights]
    return torch.stack([(each * each).sum() for each in gradients]).sum()
