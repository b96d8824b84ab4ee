"""Convert values to JSON and back: plain values, torch's values, enums, dataclasses, and callers'
own types.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .errors import AssertionFailure

Json = Any
_OF_TORCH: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class Unreadable(AssertionFailure):
    """The JSON names something that this library or torch does not have."""


def _refuse(got: str) -> NoReturn:
    raise Unreadable(
        "The saved data contain something that this version of poptorch or torch does not have",
        got=got,
        fix="use the versions of poptorch and torch that saved them, or save them again",
    )


def encode(value: Any, special: Callable[[Any], Json] = lambda value: None) -> Json:
    """Return a value as JSON, as ``{form: content}`` if necessary. ``special`` defines
    more forms.
    """
    # The exact type, because a subclass of a container would be read as its base class.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(value)}
    inner = partial(encode, special=special)
    if kind in (list, immutable_list):
        return [*map(inner, value)]
    if kind in (tuple, torch.Size):
        return {"tuple": [*map(inner, value)]}
    if kind in (dict, immutable_dict, MappingProxyType):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, enum.Enum):
        return {"enum": [kind.__name__, value.name]}
    if kind in (set, frozenset):
        return {"set": [inner(item) for item in sorted(value)]}
    if kind is complex:
        return {"complex": [inner(value.real), inner(value.imag)]}
    if kind is slice:
        return {"slice": [inner(item) for item in (value.start, value.stop, value.step)]}
    if kind is torch.device:
        return {"device": str(value)}
    for form, of_torch in _OF_TORCH.items():
        if kind is of_torch:
            return {form: str(value).removeprefix("torch.")}
    if (made := special(value)) is not None:
        return made
    if dataclasses.is_dataclass(value):
        kept = [f.name for f in dataclasses.fields(value) if f.metadata.get("saved", True)]
        return {"value": [kind.__name__, {name: inner(getattr(value, name)) for name in kept}]}
    raise TypeError(f"{kind.__qualname__} has no JSON form")


def decode(
    data: Json,
    readers: Mapping[str, Callable[[Json], Any]] = MappingProxyType({}),
    classes: Mapping[str, type] = MappingProxyType({}),
) -> Any:
    """Undo ``encode``, with readers for special forms. Only the given classes may occur in
    the data.
    """
    inner = partial(decode, readers=readers, classes=classes)
    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((form, content),) = data.items()
    match form:
        case "tuple":
            return tuple(map(inner, content))
        case "dict":
            return {inner(key): inner(item) for key, item in content}
        case "float":
            return float(content)
        case "set":
            return frozenset(map(inner, content))
        case "complex":
            return complex(*map(inner, content))
        case "slice":
            return slice(*map(inner, content))
        case "device":
            return torch.device(content)
        case "enum":
            name, member = content
            kind: Any = classes.get(name, object)
            if not issubclass(kind, enum.Enum) or member not in kind.__members__:
                _refuse(f"the value {name}.{member}")
            return kind[member]
        case "value":
            name, fields = content
            kind = classes.get(name, object)
            if not dataclasses.is_dataclass(kind):
                _refuse(f"the class {name}")
            if unknown := fields.keys() - {field.name for field in dataclasses.fields(kind)}:
                _refuse(f"the fields {', '.join(sorted(unknown))} of the class {name}")
            return classes[name](**{key: inner(item) for key, item in fields.items()})
    if form in _OF_TORCH:
        value = getattr(torch, content, None)
        if not isinstance(value, _OF_TORCH[form]):
            _refuse(f"the {form} {content} of torch")
        return value
    if form not in readers:
        _refuse(f"a value of the kind {form!r}")
    return readers[form](content)
