"""``NameScope``: a prefix for the names of operators."""

from __future__ import annotations

import contextlib
from typing import Any, Self

from .._base.errors import AssertionFailure
from .._ops import annotate


class NameScope(contextlib.ContextDecorator):
    """Operators that ``forward`` creates within the scope carry its name; scopes nest with ``/``.

    It stands before the module's path in what names operators: estimates and reports, errors about
    floating point exceptions, the log at DEBUG; and in ``getTensorNames()`` before the results of
    modules that are called within it.

    Args:
        name: one part of the path.

    Raises:
        AssertionError: the name is not a string.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionFailure(
                "A name scope must be a string",
                got=f"{type(name).__name__} {name!r}",
                fix="with poptorch.NameScope('encoder'): ...",
            )
        self._name = name
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        scope = annotate.named(self._name)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._entered.pop().__exit__(*failure)
