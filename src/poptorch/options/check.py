"""Refusing a bad value in the class of exception that PopTorch used, with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from .._base.errors import AssertionFailure, Error
from .._base.source import calling_line


def refuse(
    cls: type[Error], title: str, *, got: str | None = None, fix: str | None = None
) -> NoReturn:
    """Raise an error of the given class that names the user's own line."""
    raise cls(title, got=got, where=calling_line(), fix=fix)


def expect(name: str, value: Any, types: type | tuple[type, ...]) -> None:
    """Check the type of an argument.

    Raises:
        AssertionFailure: the value is not an instance of the type (an ``AssertionError``).
    """
    if not isinstance(value, types):
        wanted = types if isinstance(types, tuple) else (types,)
        refuse(
            AssertionFailure,
            f"Unexpected type for {name}",
            got=f"{value!r}, of type {type(value).__name__}",
            fix=f"pass {' or '.join(kind.__name__ for kind in wanted)}",
        )
