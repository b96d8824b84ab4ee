"""Intercept the operators that are called within a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from .._base import private
from .._ir.operators import Operator

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DEVICE = torch.ops.prim.device.default


def answering(answer: Answer) -> Any:
    """Return the context. ``answer`` gets the operator and its arguments, and may call it.

    ``answer`` is not called for queries of a tensor's device. Most of torch's queries are of this
    kind, because autograd makes one for every value. Function modes are off while operators run, as
    they are when one of torch's functions calls an operator. Otherwise, modes that are active
    during the backward pass would be called for each attribute that the modes below read.
    """
    return _mode_class()(answer)


@functools.cache
def _mode_class() -> Any:
    without_functions = private.optional("DisableTorchFunction") or contextlib.nullcontext

    class Mode(private.TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __init__(self, answer: Answer) -> None:
            super().__init__()
            self._answer = answer

    def dispatch(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].device
        if not isinstance(func, Operator):  # loops and branches run code of the user
            return self._answer(func, args, kwargs or {})
        with without_functions():
            return self._answer(func, args, kwargs or {})

    # In the body of the class, torch would switch its compiler off around each call. It is off
    # while torch's tracer runs, and takes a tenth of the time of a call.
    Mode.__torch_dispatch__ = dispatch
    return Mode
