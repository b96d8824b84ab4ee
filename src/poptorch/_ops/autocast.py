"""Provide ``poptorch.autocast``: torch's autocast, which a capture may disable or change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._base.log import python as log
from .._base.nested_values import dtypes_of, with_tensors
from .._base.thread_safety import holding
from .context import AutocastRules, autocast_settings


class autocast(contextlib.ContextDecorator):  # noqa: N801 (PopTorch's name)
    """Compute matrix products and convolutions in half, within a block or a decorated function.

    It is a context manager and a decorator, from releases 2.1 to 3.0. You can use
    ``torch.autocast`` instead. ``options.Precision.autocastEnabled(False)`` disables it, and
    ``options.Precision.autocastPolicy`` chooses the functions.

    Args:
        enabled: False disables an outer autocast within the block.
        dtype: the half type, ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16) -> None:
        _warn()
        self._enabled = enabled
        self._dtype = dtype
        self._blocks: list[contextlib.ExitStack] = []

    def __enter__(self) -> autocast:
        active, rules = autocast_settings.get()
        with contextlib.ExitStack() as stack:
            # Casts are recorded, so caching them between calls is useless.
            stack.enter_context(
                torch.autocast(
                    "cpu", self._dtype, enabled=self._enabled and active, cache_enabled=False
                )
            )
            if self._enabled and active and any(rules):
                stack.enter_context(with_rules((_ByRules(rules, self._dtype),)))
            self._blocks.append(stack.pop_all())
        return self

    def __exit__(self, *failure: Any) -> None:
        self._blocks.pop().__exit__(*failure)


@contextlib.contextmanager
def around_user_code(dtype: torch.dtype | None) -> Iterator[None]:
    """Run user code within the block as if it were called under this autocast, or under none.

    Autocast converts a weight once for several layers, and its gradients are added in the half
    type. The converted weight is forgotten where the outermost block ends. The tracer disables
    this, and blocks of our own would be the outermost ones.
    """
    nesting = torch.autocast_increment_nesting()
    caches = torch.is_autocast_cache_enabled()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        if dtype is None:
            with _without_autocast():
                yield
        else:
            with torch.autocast("cpu", dtype):
                yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches)
        for _ in range(nesting - 1):
            torch.autocast_increment_nesting()


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)


@functools.cache
def _warn() -> None:
    log.warning("poptorch.autocast is deprecated: use torch.autocast('cpu', torch.float16)")


class _ByRules(TorchFunctionMode):
    def __init__(self, rules: AutocastRules, dtype: torch.dtype) -> None:
        super().__init__()
        half, single, promote, demote = (frozenset(names) for names in rules)
        self._dtype = dtype
        self._rules: list[tuple[frozenset[str], Callable[[set[torch.dtype]], torch.dtype]]] = [
            (half, lambda _: dtype),
            (single, lambda _: torch.float32),
            (promote, lambda dtypes: torch.float32 if torch.float32 in dtypes else dtype),
            (demote, lambda dtypes: dtype if dtype in dtypes else torch.float32),
        ]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        for names, choose in self._rules:
            if name in names:
                args, kwargs = _in_type(choose(dtypes_of((args, kwargs))), (args, kwargs))
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


_in_force: ContextVar[tuple[_ByRules, ...]] = ContextVar("poptorch_autocast_rules", default=())


def rules_in_force() -> tuple[_ByRules, ...]:
    """Return the rules that a checkpoint must apply when it runs again, as it does with torch's
    autocast.
    """
    return _in_force.get()


@contextlib.contextmanager
def with_rules(rules: Sequence[_ByRules]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in rules:
            stack.enter_context(each)
        stack.enter_context(holding(_in_force, (*_in_force.get(), *rules)))
        yield


def _in_type(dtype: torch.dtype, arguments: Any) -> Any:
    return with_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, arguments)
