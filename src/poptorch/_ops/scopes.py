"""Notes on every operator recorded within a scope; they survive to the finished graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import fx

from .annotate import noted

NAME = "poptorch_name"
GROUP = "poptorch_multi_conv"

_prefix: ContextVar[str] = ContextVar("poptorch_name_scope", default="")


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Within the block recorded operators carry ``outer/name``."""
    path = f"{_prefix.get()}/{name}".lstrip("/")
    token = _prefix.set(path)
    try:
        with noted(**{NAME: path}):
            yield
    finally:
        _prefix.reset(token)


@contextlib.contextmanager
def grouped(number: int) -> Iterator[None]:
    """Within the block recorded convolutions belong to a group."""
    with noted(**{GROUP: number}):
        yield


def note(node: fx.Node, **values: Any) -> None:
    """Add notes to one node."""
    node.meta["custom"] = {**notes(node), **values}


def notes(node: fx.Node) -> Mapping[str, Any]:
    """Return the notes on a node."""
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return custom
