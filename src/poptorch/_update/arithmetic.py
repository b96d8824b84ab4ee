"""Compute with numbers and tensors, with the types and rounding of torch.

Torch computes with a Python number in the type of the tensor operands. If these have a half type,
it computes in float32 and rounds the result once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._base.errors import Error
from .._ir.slots import HALF_TYPES
from .known_functions import (
    ARITHMETIC,
    PRODUCTS,
    ROUNDED_NUMBERS,
    SCALED,
    SCALED_OPERANDS,
    is_in_place,
    operation_of,
    title_of,
)
from .step_value_reads import ValueNeeded, refuse_read
from .step_values import is_number, replaced, tensors_in
from .value_origins import HYPER, Identifier, Origins

# Hyper-parameters that schedules change from step to step.
_SCHEDULED = {"lr", "momentum", "betas", "weight_decay"}


class Arithmetic:
    """Calls functions that have numbers and tensors among their arguments."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._narrowed: dict[Identifier, Tensor] = {}

    def mixed(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
    ) -> Any:
        """Compute with tensors and numbers. As in torch, the numbers take the type of the tensors.

        ``given``: all tensors among the arguments.
        """
        others = [each for each in given if not is_number(each)]
        floating = [each.dtype for each in others if each.dtype.is_floating_point]
        dtype = floating[0] if floating else None
        operation = operation_of(name)
        in_half = not HALF_TYPES.isdisjoint(floating) and "out" not in kwargs
        if in_half and operation in ARITHMETIC:
            return self._rounded_once(func, name, args, kwargs, others)
        if name.rstrip("_") in SCALED:
            args, kwargs = self._scaled(name, args, kwargs, dtype)
        if name.rstrip("_") in ("clamp", "clip"):
            args = tuple(_tensor_of(each, dtype) for each in args)
            kwargs = {key: _tensor_of(each, dtype) for key, each in kwargs.items()}
        args, kwargs = replaced((args, kwargs), lambda each: self._narrow(each, dtype))
        return self.call(func, args, kwargs, given)

    def _rounded_once(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        """Compute with half types in float32, as torch does if a number is a Python number.

        Matrix products are faster in half types. Torch rounds them once if their factors are Python
        numbers. Such factors become constants, unless schedules change them.
        """
        if operation_of(name) in PRODUCTS:
            sources = self._origins.sources([kwargs.get("alpha"), kwargs.get("beta")])
            keys = frozenset(key for role, key in sources if role == HYPER)
            if len(keys) == len(sources) and not any(map(_is_scheduled, keys)):
                raise ValueNeeded(keys)
        in_place = is_in_place(name)
        dtype = tensors[0].dtype if in_place else _result_type(tensors)
        if dtype in HALF_TYPES and operation_of(name) in ROUNDED_NUMBERS:
            args, kwargs = replaced((args, kwargs), lambda each: self._narrow(each, dtype))
        args_now, kwargs_now = replaced((args, kwargs), _widened)
        given = tensors_in((args_now, kwargs_now))
        if in_place:
            name = name.replace("__i", "__", 1) if name.startswith("__") else name.rstrip("_")
            func = getattr(Tensor, name)
        made = self.mixed(func, name, args_now, kwargs_now, given).to(dtype)
        return args[0].copy_(made) if in_place else made

    def _scaled(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Scale an operand instead of using a factor that must be a Python number."""
        keyword, at = SCALED[name.rstrip("_")]
        listed = list(args)
        if isinstance(kwargs.get(keyword), Tensor):
            factor = self._narrow(kwargs.pop(keyword), dtype)
            if len(listed) > at:
                listed[at] = listed[at] * factor
            else:
                named = next(each for each in SCALED_OPERANDS if each in kwargs)
                kwargs[named] = kwargs[named] * factor
        if isinstance(kwargs.get("beta"), Tensor):
            beta = kwargs.pop("beta")
            if name.endswith("_"):
                self.refuse((beta,), f"beta of {name}")
            listed[0] = listed[0] * self._narrow(beta, dtype)
        return tuple(listed), kwargs

    def _narrow(self, number: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a number in a tensor's type, stored in memory, so that compilers compute
        it once.
        """
        if not is_number(number) or dtype is None or number.dtype is torch.bool:
            return number
        known = self._origins.name("narrow", number, str(dtype))
        if known not in self._narrowed:
            made = number.to(dtype, copy=True).as_strided((), ())
            self._narrowed[known] = self._origins.derive(known, number, made)
        return self._narrowed[known]

    def call(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor] | None = None,
    ) -> Any:
        """``given``: the tensors, before numbers among them were converted to a tensor type."""
        try:
            return func(*args, **kwargs)
        except (ValueNeeded, Error):
            raise
        except Exception:
            given = tensors_in((args, kwargs)) if given is None else given
            numbers = [each for each in given if is_number(each)]
            # the function may need Python numbers, so hyper-parameters become constants
            if numbers:
                self.refuse(numbers, title_of(func))
            raise

    def refuse(self, value: Any, what: str) -> NoReturn:
        refuse_read(self._origins, value, what)


def _is_scheduled(name: str) -> bool:
    return not _SCHEDULED.isdisjoint(name.split("."))


def _result_type(tensors: Sequence[Tensor]) -> torch.dtype:
    dtypes = [each.dtype for each in tensors if each.dim()] or [each.dtype for each in tensors]
    return functools.reduce(torch.promote_types, dtypes)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in HALF_TYPES else tensor


def _tensor_of(value: Any, dtype: torch.dtype | None) -> Any:
    return torch.full((), value, dtype=dtype) if isinstance(value, int | float) else value
