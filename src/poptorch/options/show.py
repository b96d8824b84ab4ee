"""Value-only text of stored values: equal settings print equally, and no address appears."""

from __future__ import annotations

import enum
import re
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def show(value: Any) -> str:
    """Return a deterministic text of a value; dictionaries and sets in sorted order."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        pairs = sorted((show(key), show(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(show, value))) + "}" if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (str, bytes)):
        return repr(value)
    if getattr(type(value), "__repr__", None) is object.__repr__:
        return f"{type(value).__name__}({show_pairs(getattr(value, '__dict__', {}))})"
    return _ADDRESS.sub("", repr(value))


def show_pairs(values: dict[Any, Any]) -> str:
    """Return ``name=value`` pairs in the order of the dictionary."""
    return ", ".join(f"{name}={show(value)}" for name, value in values.items())
