"""Find the first layer for which eager PyTorch and the captured graph have different values.

The output of each layer, and its gradient, are searched among the values of the graph. They are
compared by a few sums each, because keeping all values would need a second set of activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .._ir.block_labels import label_of

# number of rounding steps by which sums of equal values may differ, relative to their magnitude
_CLOSE = 100


class _Sums(NamedTuple):
    numel: int
    plain: float
    weighted: float
    size: float

    def is_close(self, other: _Sums, share: float) -> bool:
        allowed = share * max(self.size, 1e-30)
        return (
            self.numel == other.numel
            and _near(self.plain, other.plain, allowed)
            and _near(self.weighted, other.weighted, allowed)
        )


def _near(one: float, other: float, allowed: float) -> bool:
    return one == other or abs(one - other) <= allowed or (math.isnan(one) and math.isnan(other))


def _sums(value: torch.Tensor) -> _Sums:
    with torch.no_grad():
        flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
        wide = flat.to(torch.float64)
        weights = torch.cos(torch.arange(wide.numel(), dtype=torch.float64))
        return _Sums(
            wide.numel(), float(wide.sum()), float(wide @ weights), float(wide.abs().sum())
        )


@dataclass(eq=False)
class Values:
    """Sums of the outputs of layers, in order, and of their gradients."""

    outputs: list[tuple[str, _Sums]] = field(default_factory=list)
    gradients: list[tuple[str, _Sums]] = field(default_factory=list)

    def output(self, path: str, value: torch.Tensor) -> None:
        self.outputs.append((path, _sums(value)))

    def gradient(self, path: str, value: torch.Tensor) -> None:
        self.gradients.append((path, _sums(value)))


@dataclass(eq=False)
class GraphSums:
    """Sums of the values of a graph that have the size of a layer's output."""

    counts: frozenset[int]
    forward: list[_Sums] = field(default_factory=list)
    backward: list[_Sums] = field(default_factory=list)

    def see(self, node: fx.Node, result: Any) -> None:
        values = self.backward if label_of(node).backward else self.forward

        def keep(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.numel() in self.counts:
                values.append(_sums(value))
            return value

        map_aggregate(result, keep)


def sizes(values: Values) -> frozenset[int]:
    return frozenset(sums.numel for _, sums in (*values.outputs, *values.gradients))


def first_divergence(eager: Values, graph: GraphSums, rounding: float) -> tuple[str, bool] | None:
    """Return the path of the first layer that differs, and whether its gradient differs; None if
    no layer does.
    """
    share = _CLOSE * rounding
    is_there = _lookup(graph.forward, share)
    for path, sums in eager.outputs:
        if not is_there(sums):
            return path, False
    is_there = _lookup([*graph.backward, *graph.forward], share)
    for path, sums in eager.gradients:
        if not is_there(sums):
            return path, True
    return None


def _lookup(values: list[_Sums], share: float) -> Callable[[_Sums], bool]:
    return lambda expected: any(each.is_close(expected, share) for each in values)
