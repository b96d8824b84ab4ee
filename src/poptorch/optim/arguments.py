"""Check the numbers and flags of optimizers, and accept the argument order of the 1.x releases."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue

LARGEST = torch.finfo(torch.float32).max
_Init = TypeVar("_Init", bound=Callable[..., None])
_warned: set[str] = set()


def number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise AssertionFailure(
            f"Expected a number for {name}", got=repr(value), fix="use a number, such as 0.1"
        )
    _check_size(name, value)
    if name in ("loss_scaling", "velocity_scaling") and not 0 < value < math.inf:
        raise InvalidValue(
            f"{name} must be a positive number", got=repr(value), fix=f"for example {name}=1024.0"
        )
    return float(value)


def pair_of_betas(betas: Any) -> tuple[float, float]:
    """Return betas as a pair. Lists are accepted, too, because configuration files contain
    lists.
    """
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not is_pair or not all(_is_number(beta) for beta in betas):
        raise AssertionFailure(
            "Expected a pair for betas",
            got=repr(betas),
            fix=("pass two numbers, such as betas=(0.9, 0.999)"),
        )
    first, second = number("betas", betas[0]), number("betas", betas[1])
    if not (0 <= first < 1 and 0 <= second < 1):
        raise InvalidValue(
            "Each beta must be at least 0 and less than 1",
            got=f"betas=({first}, {second})",
            fix="use a number slightly below 1 for a moment that hardly changes, such as 0.999999",
        )
    return first, second


def checked(*later: str) -> Callable[[_Init], _Init]:
    """Check a constructor's flags and numbers, and also accept the argument order of the 1.x
    releases.

    Those releases lacked the arguments ``later``. The first of these is a flag, so a number in its
    place can only be the loss scale of the old order.
    """

    def decorate(init: _Init) -> _Init:
        types = {name: str(p.annotation) for name, p in inspect.signature(init).parameters.items()}
        del types["self"]
        names = [*types]
        old = [name for name in names if name not in later]

        @functools.wraps(init)
        def checking(self: Any, *args: Any, **kwargs: Any) -> None:
            cls = type(self).__qualname__
            at = names.index(later[0]) if later else len(args)
            order = names
            if len(args) > at and _is_number(args[at]):
                order = old
                if cls not in _warned:
                    _warned.add(cls)
                    log.python.warning(
                        (
                            "The arguments of %s are in the order of the 1.x releases, so %s is "
                            "used as loss_scaling. Pass the arguments after %s by keyword"
                        ),
                        cls,
                        args[at],
                        names[at - 1],
                    )
                if len(args) > len(old) or {*old[: len(args)]} & kwargs.keys():
                    raise TypeError(f"{cls}() got an argument twice, or too many arguments")
            given = dict(zip(order, args, strict=False))
            _check(cls, types, given | kwargs)
            if order is old:
                init(self, **given, **kwargs)
            else:
                init(self, *args, **kwargs)

        return cast("_Init", checking)

    return decorate


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or (isinstance(value, int | float) and not isinstance(value, bool))


def _check(cls: str, types: Mapping[str, str], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        kind = types.get(name, "")
        is_flag, is_number = kind.startswith("bool"), kind.startswith("float")
        if value is None and kind.endswith("None"):
            continue
        right = isinstance(value, int) and value in (0, 1) if is_flag else _is_number(value)
        if (is_flag or is_number) and not right:
            raise AssertionFailure(
                f"Expected a {'flag' if is_flag else 'number'} for {name}",
                got=f"{cls}(..., {name}={value!r})",
                fix=(
                    f"pass {'True or False' if is_flag else 'a number, such as 0.1'}",
                    (
                        "or, if this value belongs to another argument, pass it by keyword, for "
                        "example loss_scaling=2.0"
                    ),
                ),
            )
        if is_number:
            _check_size(name, value)


def _check_size(name: str, value: Any) -> None:
    """Refuse a number that is too large for float32."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if abs(value) > LARGEST and not (isinstance(value, float) and math.isinf(value)):
        shown = value if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
        raise InvalidValue(
            f"The number given for {name} is too large",
            got=(
                f"{shown}; on the device, hyper-parameters are float32, regardless of the "
                "type of the weights"
            ),
            fix=f"use a number between -{LARGEST:.3g} and {LARGEST:.3g}",
        )
