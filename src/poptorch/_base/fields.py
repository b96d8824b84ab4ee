"""Objects as their attributes by name: dataclasses, and classes that are treated like them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_like_dataclasses: list[type] = []


def traverse_attributes(kind: type) -> None:
    """Let objects of a class, or one derived from it, be traversed as dataclasses are."""
    _like_dataclasses.append(kind)


def has_fields(value: object) -> bool:
    """Tell whether a value is an instance of a dataclass, or of a class that is treated like one.

    A dataclass itself, rather than an instance, has none.
    """
    return _is_dataclass_instance(value) or isinstance(value, tuple(_like_dataclasses))


def _is_dataclass_instance(value: object) -> bool:
    return hasattr(type(value), "__dataclass_fields__")


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, then the other attributes of an instance."""
    names = [f.name for f in dataclasses.fields(value)] if _is_dataclass_instance(value) else []
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


def with_fields(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Build an instance from what ``fields_of`` returned; its ``__init__`` does not run."""
    made = kind.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # also where the class is frozen
    return made
