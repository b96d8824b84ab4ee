"""Skip operators that were already run for another weight in the same way, and only create their
results.

A result without values consists of a shape and a type. In a model with 50 weights, running the
operators for one weight of each kind takes a quarter of the time for all weights. Of functions that
call only pointwise operators, not even one weight of each shape is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base import private
from .._ops.pointwise_results import likeness, model_of
from .likeness import Wholes
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


@dataclass(frozen=True)
class _Outcome:
    # a tensor with its own memory; None: the first argument, which was written to
    made: Geometry | None
    whole: bool  # whether the operator reads the weight as a whole


class Repeats:
    """Answers for operators. ``mode`` is the mode whose tensors have no values."""

    def __init__(self, mode: Any, wholes: Wholes) -> None:
        self._mode, self._wholes = mode, wholes
        self._outcomes: dict[int, _Outcome | None] = {}  # None if it must be computed each time
        self._pointwise: dict[tuple[Any, ...], _Outcome] = {}  # of some shape
        self._cls = private.optional("FakeTensor")
        self._undisturbed = private.optional("DisableTorchDispatch")

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
            outcome = self._predicted(like, args, kwargs)
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
            return self._cls(self._mode, inner, _HOST)  # type: ignore[no-any-return]

    def _made(self, geometry: Geometry) -> Tensor:
        shape, stride, _, dtype = geometry
        with self._undisturbed():
            inner = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._cls(self._mode, inner, _HOST)  # type: ignore[no-any-return]

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
        known = None if like is None else self._pointwise.get(like)
        if known is None or known.made is None:
            return known
        made = _expected(args, kwargs, known.made.dtype)
        return None if made is None else _Outcome(made, whole=False)

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
        self._wholes.is_by_element = None
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
        if like is not None and outcome is not None and self._wholes.is_by_element and not whole:
            made = outcome.made
            if made is None or made == _expected(args, kwargs, made.dtype):
                self._pointwise[like] = outcome
        return result


def _expected(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Geometry | None:
    """Return the shape and layout of a new result of a pointwise function; None if unknown."""
    model = model_of(tensors_in((args, kwargs)), written=False)
    return None if model is None else Geometry(tuple(model.shape), model.stride(), 0, dtype)
