"""Decide whether one program can serve all sizes, if inputs differ from earlier ones only in sizes.

The first size of an input has its own program. With the second one, the dimensions that differ
get symbols, and one program is compiled for all their sizes. It takes the place of the earlier one,
so that results do not depend on which size came first. A size of 1 is broadcast, so it keeps its
own program. If sizes cannot be symbolic, each of them has its own program, and ``VaryingSizes``
stores the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ... import backends
from ..._ir.conditions import LEAST
from ..._ir.spec import Spec

Dimension = tuple[int, int]  # an input, by number, and one of its dimensions
Shapes = Sequence[Sequence[int]]


class VaryingSizes:
    """Which dimensions of inputs get symbols."""

    def __init__(self) -> None:
        # why dimensions cannot be symbolic together
        self.reasons: dict[frozenset[Dimension], str] = {}

    def symbols(
        self, spec: Spec, before: Shapes, known: Mapping[Dimension, str], now: Shapes
    ) -> Mapping[Dimension, str]:
        """Return a name for each dimension that is to be symbolic; none if none can be.

        Dimensions that were equal to each other before and now have one name.

        Args:
            before: the shapes of the tensors that an earlier program ran with last.
            known: its own symbols.
            now: the shapes of a call that it does not take.
        """
        if why_fixed(spec) is not None:
            return {}
        loops = spec.loops
        if not all(map(loops.divides, now)):
            return {}
        before, now = ([*map(loops.of_micro_batch, shapes)] for shapes in (before, now))
        names: dict[tuple[int, int, str], str] = {}
        found: dict[Dimension, str] = {}
        for place, old, new in _dimensions(before, now):
            if old == new and place not in known:
                continue
            if new < LEAST:
                return {}
            kind = old, new, known.get(place, "")
            found[place] = names.setdefault(kind, f"s{len(names)}")
        return found


def _dimensions(before: Shapes, now: Shapes) -> list[tuple[Dimension, int, int]]:
    return [
        ((at, dim), old, new)
        for at, shapes in enumerate(zip(before, now, strict=True))
        for dim, (old, new) in enumerate(zip(*shapes, strict=True))
    ]


def why_fixed(spec: Spec) -> str | None:
    """Return why sizes cannot be symbolic with these settings, if so."""
    if spec.runs_together:
        return "several processes run the model together"
    if spec.precision.stochastic_rounding:
        return "the program uses stochastic rounding"
    if spec.runtime.is_reported:
        return "reports of costs are enabled, and costs depend on sizes"
    if spec.target.synthetic_data:
        return "the program runs with synthetic data"
    if spec.target.backend not in (backends.AUTO, backends.OPTIMISE, "reference", "inductor"):
        return f"the backend {spec.target.backend} takes fixed sizes"
    return None


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
