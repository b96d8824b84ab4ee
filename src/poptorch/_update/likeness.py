"""Find weights that a step updates in the same way, element by element, so that they can be updated
as one.

Two weights are alike if the same operators compute their results, regardless of their shapes. A
weight that an operator reads as a whole, as a norm does, is not like any other weight.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from .._base.errors import Error
from .step_values import Geometry, tensors_in
from .value_origins import WEIGHT, Identifier, Origins

aten = torch.ops.aten
# These take no sizes; their results have the shape of their first argument.
_LIKE_FIRST = {
    aten.copy_.default, aten.detach.default, aten.empty_like.default, aten.fill_.Scalar,
    aten.fill_.Tensor, aten.full_like.default, aten.ones_like.default, aten.zero_.default,
    aten.zeros_like.default, aten._to_copy.default,
}  # fmt: skip
_KEEP_ELEMENTS = _LIKE_FIRST | {
    aten.alias.default, aten.clone.default, aten.new_empty.default, aten.new_full.default,
    aten.new_ones.default, aten.new_zeros.default,
}  # fmt: skip

# The sizes of their results are those of their first argument, or 1.
_REDUCTIONS = {
    aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default, aten.mean.default,
    aten.mean.dim, aten.sum.default, aten.sum.dim_IntList,
}  # fmt: skip


class ShapeRule(enum.Enum):
    """How the shapes of results follow from those of arguments."""

    SAME = enum.auto()
    REDUCED = enum.auto()
    OTHER = enum.auto()


class WholeReads:
    """Records which weights operators read as a whole, or together with other weights."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self.paths: set[str] = set()
        self.seen: set[str] = set()  # since it was last emptied
        # For all operators since it was last set to None; None if none ran.
        self.shapes: ShapeRule | None = None

    def answer(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise Error(
                "The optimizer's step draws random numbers",
                got=(f"{operator}; every process and replica would have to draw the same numbers"),
                fix="draw the numbers in forward, or use an optimizer that draws none",
            )
        result = operator(*args, **kwargs)
        shapes = _shapes_of(operator, args, kwargs, result)
        joined = shapes if self.shapes is ShapeRule.SAME is shapes else ShapeRule.OTHER
        self.shapes = shapes if self.shapes is None else joined
        if not isinstance(result, torch.Tensor | tuple | list):
            return result  # only the device or the layout changes
        sources = self._origins.spread((args, kwargs), result)
        weights = {key for role, key in sources if role == WEIGHT}
        by_element = torch.Tag.pointwise in operator.tags or operator in _KEEP_ELEMENTS
        if weights and (len(weights) > 1 or not by_element):
            self.add(weights)
        return result

    def is_of_one(self, values: Any) -> bool:
        """Return whether values are computed from one weight."""
        return len({key for role, key in self._origins.sources(values) if role == WEIGHT}) == 1

    def add(self, weights: Iterable[str]) -> None:
        self.paths.update(weights)
        self.seen.update(weights)


def _shapes_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> ShapeRule:
    if torch.Tag.pointwise in operator.tags or operator in _LIKE_FIRST:
        return ShapeRule.SAME
    if operator in _REDUCTIONS:
        return ShapeRule.REDUCED
    of_numbers = all(each.dim() == 0 for each in tensors_in((args, kwargs, result)))
    return ShapeRule.SAME if of_numbers else ShapeRule.OTHER


class _DependsOnShape(Exception):  # noqa: N818 (it says what is the case)
    pass


class Signatures:
    """Texts that are equal for values that are computed in the same way from two weights."""

    def __init__(self, origins: Origins, shape: tuple[int, ...]) -> None:
        self._forms = origins.forms
        self._shape = shape
        self._sizes = tuple(("int", size) for size in shape)
        self._known: dict[int, str] = {}

    def of(self, results: Iterable[tuple[str, Identifier]]) -> str | None:
        """Return a text for all results of a weight, by name; None if they depend on its shape."""
        try:
            return self._digest(tuple(results))
        except _DependsOnShape:
            return None

    def _of(self, number: int) -> str:
        if number not in self._known:
            self._known[number] = self._digest(self._forms[number])
        return self._known[number]

    def _digest(self, form: Any) -> str:
        return hashlib.sha256(repr(self._without_shape(form)).encode()).hexdigest()

    def _without_shape(self, form: Any) -> Any:
        if isinstance(form, Identifier):
            return self._of(form.number)
        if isinstance(form, Geometry):
            if form.shape == ():
                return "number", form.dtype
            dense = torch.empty(form.shape, device="meta").stride()
            if (form.shape, form.stride, form.offset) != (self._shape, dense, 0):
                raise _DependsOnShape
            return "elements", form.dtype
        if isinstance(form, tuple):
            if form and form == self._sizes:
                return "sizes"
            if form[:1] == ("foreign",):
                raise _DependsOnShape
            return tuple(map(self._without_shape, form))
        return form
