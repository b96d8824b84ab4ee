"""Replace functions of torch that need numbers where a size may be symbolic, such as
``torch.tensor(x.shape[1])`` and ``torch.linspace(0, 1, x.shape[1])``.

With symbols, they are recorded as other operators. A graph with symbols is compared with one with
numbers, in which the same calls must be recorded as the same operators. Therefore, the calls that
got a symbol are noted in order, and these are replaced in the other capture, too. Other files that
replace such functions ask ``is_sized``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from .trace import untraced

_SYMBOLS = (torch.SymInt, torch.SymFloat)


class SizedCalls:
    """Whether each call of these functions gets a symbolic size.

    Args:
        known: the answers of a capture with symbols, for a capture with numbers.
    """

    def __init__(self, known: Sequence[bool] = ()) -> None:
        self.found: list[bool] = []
        self._known: Iterator[bool] = iter(known)

    def ask(self, is_symbolic: bool) -> bool:
        """Return whether the next call is to be replaced."""
        self.found.append(is_symbolic or next(self._known, False))
        return self.found[-1]


sized_calls: ContextVar[SizedCalls | None] = ContextVar("poptorch_sized_calls", default=None)


def is_sized(*values: Any) -> bool:
    """Return whether a call is to be replaced, because one of its values may be symbolic."""
    calls = sized_calls.get()
    return calls is not None and calls.ask(any(map(_has_symbol, values)))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_symbol, value))
    return isinstance(value, _SYMBOLS)


def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _of_sizes(torch.tensor, data, *args, **kwargs)


def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _of_sizes(torch.as_tensor, data, *args, **kwargs)


def new_tensor(like: torch.Tensor, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _of_sizes(like.new_tensor, data, *args, **kwargs)


def _of_sizes(function: Any, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not is_sized(data) or args or not _is_plain(kwargs) or not _has_numbers_only(data):
        return function(data, *args, **kwargs)  # type: ignore[no-any-return]
    with untraced():
        dtype = function(_zeros(data), **kwargs).dtype
    return _filled(data, dtype)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Return whether a call asks for nothing but a type."""
    others = {name: value for name, value in kwargs.items() if name != "dtype"}
    device = others.pop("device", None)
    return not any(others.values()) and (device is None or torch.device(device).type == "cpu")


def _has_numbers_only(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return all(map(_has_numbers_only, data))
    return isinstance(data, (bool, int, float, *_SYMBOLS))


def _zeros(data: Any) -> Any:
    """Return numbers of the same types, because only the type of the tensor is asked for."""
    if isinstance(data, (list, tuple)):
        return [*map(_zeros, data)]
    if isinstance(data, _SYMBOLS):
        return 0 if isinstance(data, torch.SymInt) else 0.0
    return data


def _filled(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_filled(each, dtype) for each in data])
    return torch.full((), data, dtype=dtype)


def linspace(start: Any, end: Any, steps: Any = None, **kwargs: Any) -> torch.Tensor:
    given = is_sized(start, end, steps)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    is_plain = _is_plain(kwargs) and dtype.is_floating_point and _has_numbers_only([start, end])
    if not given or not is_plain or steps is None or steps == 1:
        return torch.linspace(start, end, steps, **kwargs)
    # As torch computes it, from both ends to the middle.
    at, step = torch.arange(steps, dtype=dtype), (end - start) / (steps - 1)
    return torch.where(at < steps // 2, start + step * at, end - step * (steps - 1 - at))
