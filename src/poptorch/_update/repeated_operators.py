"""Skip operators that were already run for another weight in the same way, and only create their
results.

A result without values consists of a shape and a type. In a model with 50 weights, running the
operators for one weight of each kind takes a quarter of the time for all weights. Functions that
call only pointwise operators, or only one reduction, are run for one shape.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._base import private
from .._ops.pointwise_results import likeness, model_of
from .likeness import ShapeRule, WholeReads
from .step_values import (
    Geometry,
    geometry_of,
    is_number,
    is_whole,
    place_of,
    tensors_in,
    unobserved,
)
from .value_origins import Identifier

_HOST = torch.device("cpu")
_SIZED = {Tensor.new_zeros, Tensor.new_ones}


@dataclass(frozen=True)
class _Outcome:
    # a tensor with its own memory; None: the first argument, which was written to
    made: Geometry | None
    whole: bool  # whether the operator reads the weight as a whole
    # the dimensions of the argument with size 1 in the result; None if it has no dimensions
    reduced: tuple[int, ...] | None = ()


class Repeats:
    """Answers for operators. ``mode`` is the mode whose tensors have no values."""

    def __init__(self, mode: Any, wholes: WholeReads) -> None:
        self._mode, self._wholes = mode, wholes
        self._outcomes: dict[int, _Outcome | None] = {}  # None if it must be computed each time
        self._of_some_shape: dict[tuple[Any, ...], _Outcome] = {}
        self._cls = private.optional("FakeTensor")
        self._undisturbed = private.optional("DisableTorchDispatch")
        self._make = private.optional("make_subclass")
        self._guard = private.optional("set_throw_on_mutable_data_ptr")
        self._attributes: dict[str, Any] | None = None  # of a tensor without values

    def __call__(
        self,
        func: Any,
        known: Identifier,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Return the result of ``compute`` for a call of a function, which is identified by its
        number.
        """
        if torch.is_grad_enabled() or self._cls is None or self._undisturbed is None:
            return compute()
        if known.number not in self._outcomes:
            like = self._likeness(func, known, args, kwargs)
            outcome = self._sized(func, args, kwargs) or self._predicted(like, args, kwargs)
            if outcome is None:
                return self._computed(known, like, args, kwargs, compute)
            self._outcomes[known.number] = outcome
        outcome = self._outcomes[known.number]
        if outcome is None:
            return compute()
        if outcome.whole:
            self._wholes.add([known.weight])
        return args[0] if outcome.made is None else self._made(outcome.made)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without values, with its own memory."""
        if self._cls is None or self._undisturbed is None:
            return torch.empty(shape, dtype=dtype)
        with unobserved():
            with self._undisturbed():
                inner = torch.empty(shape, dtype=dtype, device="meta")
            return self._without_values(inner)

    def _made(self, geometry: Geometry) -> Tensor:
        shape, stride, _, dtype = geometry
        with self._undisturbed():
            inner = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._without_values(inner)

    def _without_values(self, inner: Tensor) -> Tensor:
        """Return a tensor of the mode. The first one is made by torch, which checks forty arguments
        and attributes; the others get its attributes.
        """
        if self._attributes is None or self._make is None or self._guard is None:
            made: Tensor = self._cls(self._mode, inner, _HOST)
            self._attributes = dict(vars(made))
            return made
        made = self._make(
            self._cls, inner, False, dispatch_device=True, device_for_backend_keys=_HOST
        )
        self._guard(made)
        vars(made).update(self._attributes)
        return made

    def _likeness(
        self, func: Any, known: Identifier, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return a key of calls whose results differ only in their shape, or None."""
        if not known.weight or not self._wholes.is_of_one((args, kwargs)):
            return None
        like = likeness(args, kwargs, lambda each: (is_number(each), is_whole(each)))
        return None if like is None else (func, *like)

    def _predicted(
        self, like: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Outcome | None:
        """Return the outcome of a call, if one on another shape was like it."""
        known = None if like is None else self._of_some_shape.get(like)
        if known is None or known.made is None:
            return known
        made = _expected(args, kwargs, known.made.dtype, known.reduced)
        return None if made is None else replace(known, made=made)

    def _sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome | None:
        """Return the outcome of a call that names the sizes of its result."""
        if func not in _SIZED or len(args) != 2 or kwargs or type(args[0]) is not self._cls:
            return None
        sizes = args[1]
        if not isinstance(sizes, list | tuple) or any(type(size) is not int for size in sizes):
            return None
        return _Outcome(Geometry(tuple(sizes), dense(sizes), 0, args[0].dtype), whole=False)

    def _computed(
        self,
        known: Identifier,
        like: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        given = {place_of(each) for each in tensors_in((args, kwargs))}
        first: Any = args[0] if args else None
        before = geometry_of(first) if isinstance(first, Tensor) else None
        self._wholes.seen.clear()
        self._wholes.shapes = None
        result = compute()
        whole = known.weight in self._wholes.seen
        outcome = None
        if first is not None and result is first and "out" not in kwargs:
            if geometry_of(result) == before:
                outcome = _Outcome(None, whole)
        elif type(result) is self._cls and place_of(result) not in given:
            geometry = geometry_of(result)
            plain = geometry.offset == 0 and not (result.is_conj() or result.is_neg())
            if plain and result.device.type == "cpu" and not result.requires_grad:
                outcome = _Outcome(geometry, whole)
        self._outcomes[known.number] = outcome
        if like is not None and outcome is not None:
            self._note_shapes(like, outcome, args, kwargs)
        return result

    def _note_shapes(
        self, like: tuple[Any, ...], outcome: _Outcome, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Record an outcome if the one for other shapes follows from it."""
        made, shapes = outcome.made, self._wholes.shapes
        if shapes is ShapeRule.REDUCED and made is not None:
            given = next((each.shape for each in tensors_in((args, kwargs)) if each.dim()), ())
            outcome = replace(outcome, reduced=_reduced(given, made.shape))
        elif shapes is not ShapeRule.SAME:
            return
        if made is None or made == _expected(args, kwargs, made.dtype, outcome.reduced):
            self._of_some_shape[like] = outcome


def _reduced(given: Sequence[int], made: Sequence[int]) -> tuple[int, ...] | None:
    pairs = enumerate(zip(given, made, strict=False))
    return tuple(at for at, (before, now) in pairs if now < before) if made else None


def _expected(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    reduced: tuple[int, ...] | None,
) -> Geometry | None:
    """Return the shape and layout of a new result of a pointwise function, or of a reduction; None
    if unknown.
    """
    model = model_of(tensors_in((args, kwargs)), written=False)
    if model is None:
        return None
    if reduced == ():
        return Geometry(tuple(model.shape), model.stride(), 0, dtype)
    sizes = [] if reduced is None else [*model.shape]
    for at in reduced or ():
        sizes[at] = 1
    return Geometry(tuple(sizes), dense(sizes), 0, dtype)


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    steps = itertools.accumulate((max(size, 1) for size in sizes[:0:-1]), operator.mul, initial=1)
    return (*steps,)[::-1] if sizes else ()
