"""The attributes that operators created now would carry (``poptorch.Attribute``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

Attributes = Mapping[str, Mapping[str, str]]

_NONE: Attributes = MappingProxyType({})
current: ContextVar[Attributes] = ContextVar("poptorch attributes", default=_NONE)
