"""Turning what goes wrong inside the user's ``forward`` into errors that teach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from .._base import source
from .._base.errors import Error
from .trace import has_dynamic_shape, needs_value
from .values import Uncapturable, dynamic_shape


@contextlib.contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Re-raise what ``forward`` raises as an Error that keeps the original class and line.

    Interrupts and our own errors pass through untouched.
    """
    try:
        yield
    except Error:
        raise
    except Exception as error:
        if has_dynamic_shape(error):
            raise dynamic_shape(str(error), source.raising_line(error)) from error
        raise (
            _value_needed(error, module) if needs_value(error) else _as_error(error, module)
        ) from error


def _value_needed(error: Exception, module: nn.Module) -> Error:
    return Uncapturable(
        "A tensor's value is needed while the model is being captured",
        got=f"{error} in forward of {type(module).__name__}",
        where=source.raising_line(error),
        fix=(
            "keep the decision in tensors: torch.where, masks, fixed-size results",
            "pass the value to forward as a Python number: a compile-time constant",
        ),
    )


def _as_error(error: Exception, module: nn.Module) -> Error:
    cls: type[Error] = Error
    with contextlib.suppress(TypeError):  # classes of incompatible layout cannot be joined
        cls = type("Error", (Error, type(error)), {"__module__": "poptorch"})
    joined = cls.__new__(cls)
    Error.__init__(
        joined,
        f"forward of {type(module).__name__} raised {type(error).__name__}",
        got=str(error) or "no message",
        where=source.raising_line(error),
        fix="call the module on one micro-batch without poptorch to see the same failure",
    )
    return joined
