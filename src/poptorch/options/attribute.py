"""Define ``poptorch.Attribute``: hints for the operators that are created in a scope."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Self

from .._base.errors import AssertionFailure

ActiveAttributes = Mapping[str, Mapping[str, str]]
# The attributes that operators created now receive.
current: ContextVar[ActiveAttributes] = ContextVar(
    "poptorch attributes", default=MappingProxyType({})
)


class Attribute:
    """Give attributes to the operators of a scope of ``forward``; only a hint.

    Scopes nest: an inner one adds or overrides keys, and leaving it restores them. Hooks may call
    ``__enter__`` and ``__exit__``.

    Args:
        kwargs: a dictionary of strings for each family of attributes, as in
            ``Attribute(__outline={"layer": "embedding"})``.

    Raises:
        AssertionFailure: a value is not a dictionary of strings (an ``AssertionError``).
    """

    def __init__(self, **kwargs: dict[str, str]) -> None:
        for family, values in kwargs.items():
            if not isinstance(values, dict) or not all(
                isinstance(text, str) for pair in values.items() for text in pair
            ):
                raise AssertionFailure(
                    "Attributes must be dictionaries of strings",
                    got=f"{family}={values!r}",
                    fix='for example poptorch.Attribute(__outline={"layer": "embedding"})',
                )
        self._attributes = kwargs
        self._outer: list[ActiveAttributes] = []

    def __enter__(self) -> Self:
        outer = current.get()
        self._outer.append(outer)
        merged = {
            family: {**outer.get(family, {}), **values}
            for family, values in self._attributes.items()
        }
        current.set({**outer, **merged})
        return self

    def __exit__(self, *failure: object) -> None:
        current.set(self._outer.pop())

    def __repr__(self) -> str:
        pairs = (f"{name}={value!r}" for name, value in self._attributes.items())
        return f"Attribute({', '.join(pairs)})"
