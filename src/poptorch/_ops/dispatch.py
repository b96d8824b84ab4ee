"""Intercept the operators that are called within a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._base import private


def answering(answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return the context. ``answer`` gets the operator and its arguments, and may call it."""

    class Mode(private.TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return answer(func, args, kwargs or {})

    return Mode()
