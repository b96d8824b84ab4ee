"""Decide whether two computations agree, with a tolerance that follows from rounding.

Two correct computations of a value differ by rounding. How much they differ depends on the model: a
chaotic one amplifies differences. Therefore the computation is repeated with a small disturbance, a
*nudge*. The effect of the nudge times ``REACH`` is the limit for the effect of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .graph import Graph

REACH = 30  # the effect of all rounding is at most this number of nudges
# Results may differ by this number of rounding steps of the narrowest type, as a share of the
# largest value, if the effect of a nudge is not known. Types with fine rounding may differ by the
# second number.
_ROUNDINGS, _FINE_ROUNDINGS, _FINE = 4, 32, 1e-5


@dataclass(frozen=True)
class Difference:
    """A value on which two computations do not agree."""

    name: str
    most: float  # largest absolute difference; infinite if types, shapes or infinities differ
    allowed: float
    what: str = ""  # in words, if a number is not enough

    def __str__(self) -> str:
        if self.what:
            return f"{self.name}: {self.what}"
        return f"{self.name} differs by {self.most:.3g}, more than {self.allowed:.3g}"


def coarsest(graph: Graph) -> float:
    """Return the rounding step at 1 of the narrowest floating-point type in which a graph computes.

    It is 0 for a graph that only computes with integers.
    """
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    types = {v.dtype for v in values if isinstance(v, torch.Tensor) and _rounds(v.dtype)}
    return max((torch.finfo(each).eps for each in types), default=0.0)


def share_of(rounding: float) -> float:
    """Return the tolerance for a rounding step at 1, as a share of the largest value."""
    return max(_ROUNDINGS * rounding, min(_FINE_ROUNDINGS * rounding, _FINE))


def difference(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    share: float,
    moved: float = 0.0,
    size: torch.Tensor | None = None,
) -> Difference | None:
    """Compare two values of one shape, whose types may differ in width.

    Args:
        name: the name of the value.
        found: the value to check.
        expected: the value to compare with.
        share: the tolerance as a share of the largest value; 0 for integers.
        moved: the effect of a nudge on the value, if it is known.
        size: absolute values of the terms, if ``expected`` is a sum.
    """
    if found.shape != expected.shape:
        shapes = f"has shape {list(found.shape)} instead of {list(expected.shape)}"
        return Difference(name, float("inf"), 0.0, shapes)
    if found.dtype.is_complex != expected.dtype.is_complex:
        types = f"is {found.dtype} instead of {expected.dtype}"
        return Difference(name, float("inf"), 0.0, types)
    found, expected = with_arithmetic(found), with_arithmetic(expected)
    if _are_close_at_once(found, expected, share):
        return None
    known = torch.isfinite(expected)
    if not torch.equal(known, torch.isfinite(found)):
        counts = [int((~torch.isfinite(each)).sum()) for each in (found, expected)]
        infinities = "{} elements are infinite or NaN, instead of {}".format(*counts)
        return Difference(name, float("inf"), 0.0, infinities)
    if not known.any():
        return None
    most = _largest((_wide(found) - _wide(expected))[known])
    largest = _largest(_wide(expected if size is None else size)[known])
    allowed = (share * largest if _rounds(expected.dtype) else 0.0) + REACH * moved
    return Difference(name, most, allowed) if most > allowed else None


def _are_close_at_once(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Return whether values surely agree, with a fast check that makes no 64-bit copies."""
    if found.dtype != expected.dtype or not _rounds(found.dtype) or not found.numel():
        return torch.equal(found, expected)
    most, largest = (found - expected).abs().max(), expected.abs().max()
    return bool(most <= share / 2 * largest) and bool(torch.isfinite(largest))


def with_arithmetic(value: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a type for which torch has arithmetic, unlike floats of 8 bits."""
    small = value.dtype.is_floating_point and value.dtype.itemsize == 1
    return value.float() if small else value


def movement(value: torch.Tensor, nudged: torch.Tensor) -> float:
    """Return the effect of a nudge on a value, where both are finite."""
    value, nudged = with_arithmetic(value), with_arithmetic(nudged)
    both = torch.isfinite(value) & torch.isfinite(nudged)
    return _largest((_wide(nudged) - _wide(value))[both]) if both.any() else 0.0


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())
