"""Notes on every operator recorded within a scope; they survive to the finished graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from .annotate import noted, recorder

GROUP = "poptorch_multi_conv"


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Within the block recorded operators carry ``outer/name``."""
    active = recorder()
    with contextlib.nullcontext() if active is None else active.scope(name):
        yield


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
