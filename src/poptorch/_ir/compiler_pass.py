"""Define ``Pass``, one step of a compilation, and leave steps out by their names.

A pass is a function from values to a value. The names of its parameters are the values that it
needs, so nothing else says in which order passes can run. If results are wrong, leaving out one
pass after the other finds the one that is wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._base.thread_safety import holding


@dataclass(frozen=True)
class Pass:
    name: str
    package: str  # the package that does the work
    function: Callable[..., Any]
    makes: str | None = None  # the value that the function returns; None for a check
    # Makes the same value if the pass is left out; None if the pass cannot be left out.
    without: Callable[..., Any] | None = None
    parts: tuple[str, ...] = ()  # steps inside of it that can be left out, too

    @cached_property
    def needs(self) -> tuple[str, ...]:
        return parameters(self.function)

    @property
    def does(self) -> str:
        sentence = " ".join((self.function.__doc__ or "").split()).rstrip(".")
        return sentence[:1].lower() + sentence[1:]

    @property
    def optional(self) -> tuple[str, ...]:
        """What can be left out: its own name, or names of its parts."""
        return (*((self.name,) if self.without is not None else ()), *self.parts)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


_left_out: ContextVar[frozenset[str]] = ContextVar("poptorch_left_out", default=frozenset())


def leaving_out(names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Leave out more passes within the block."""
    return holding(_left_out, _left_out.get() | {*names})


def is_left_out(name: str) -> bool:
    return name in _left_out.get()
