"""What the constructors of optimizers check before anything else, and the order of 1.x releases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from .._base import log
from .._base.errors import AssertionFailure
from .numbers import check_size

_FLAGS = frozenset({
    *("nesterov", "amsgrad", "centered", "maximize", "foreach", "capturable", "differentiable"),
    *("fused", "use_combined_accum", "bias_correction", "use_tf_variant"),
})  # fmt: skip
_NUMBERS = frozenset({
    *("lr", "momentum", "dampening", "weight_decay", "eps", "alpha"),
    *("loss_scaling", "velocity_scaling", "max_grad_norm", "max_weight_norm"),
})  # fmt: skip
_Init = TypeVar("_Init", bound=Callable[..., None])
_said: set[str] = set()


def checked(*later: str) -> Callable[[_Init], _Init]:
    """Check a constructor's arguments, and take them in the order of the 1.x releases too.

    Args:
        later: arguments that those releases lacked, one behind another. A number in the place of
            the first of them, which is a flag, can only be the old order's loss scale; the
            old order is then taken, and a warning says so.
    """

    def decorate(init: _Init) -> _Init:
        names = [*inspect.signature(init).parameters][1:]
        old = [name for name in names if name not in later]

        @functools.wraps(init)
        def checking(self: Any, *args: Any, **kwargs: Any) -> None:
            cls = type(self).__qualname__
            at = names.index(later[0]) if later else len(args)
            if len(args) > at and _is_number(args[at]):
                _say(cls, args[at], names[at - 1])
                given = dict(zip(old, args, strict=False))
                if len(args) > len(old) or given.keys() & kwargs.keys():
                    raise TypeError(f"{cls}() got an argument twice, or too many of them")
                _check(cls, given | kwargs)
                init(self, **given, **kwargs)
                return
            _check(cls, dict(zip(names, args, strict=False)) | kwargs)
            init(self, *args, **kwargs)

        return cast("_Init", checking)

    return decorate


def _say(cls: str, scale: Any, last: str) -> None:
    if cls not in _said:
        _said.add(cls)
        log.python.warning(
            "%s was given its arguments in the order of the 1.x releases: %s is taken as "
            "loss_scaling. Pass what follows %s by keyword",
            cls,
            scale,
            last,
        )


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or (isinstance(value, int | float) and not isinstance(value, bool))


def _check(cls: str, given: Mapping[str, Any]) -> None:
    """Refuse a value of the wrong type, or one that is too large.

    Raises:
        AssertionError: a number where a flag belongs, or the reverse.
        ValueError: float32 cannot hold a number.
    """
    for name, value in given.items():
        wrong = (name in _FLAGS and value is not None and not isinstance(value, bool | int)) or (
            name in _NUMBERS and value is not None and not _is_number(value)
        )
        wrong = wrong or (name in _FLAGS and _is_number(value) and value not in (0, 1))
        if wrong:
            raise AssertionFailure(
                f"Expected a {'flag' if name in _FLAGS else 'number'} for {name}",
                got=f"{cls}(..., {name}={value!r})",
                fix=(
                    f"pass {'True or False' if name in _FLAGS else 'a number, such as 0.1'}",
                    "pass what follows the torch hyper-parameters by keyword",
                ),
            )
        if name in _NUMBERS and value is not None:
            check_size(name, value)
