"""The graphs that are being recorded, and where a tensor stands in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from .._base import private

aten = torch.ops.aten
# These keep the numbers of a tensor where they keep how many there are.
_KEEPING = {
    aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default,
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.mean.default, aten.mean.dim, aten.sum.default, aten.sum.dim_IntList,
}  # fmt: skip

_outer: ContextVar[tuple[Any, ...]] = ContextVar("poptorch_recorders", default=())


def recorders() -> tuple[Any, ...]:
    """The recorders at work: those of the surroundings, then the present one."""
    mode = private.get_proxy_mode()
    return _outer.get() if mode is None else (*_outer.get(), mode.tracer)


@contextlib.contextmanager
def within(surroundings: tuple[Any, ...]) -> Iterator[None]:
    """Within the block another graph is recorded, while these wait."""
    token = _outer.set(surroundings)
    try:
        yield
    finally:
        _outer.reset(token)


def recorded(tensor: torch.Tensor) -> tuple[fx.Node, torch.nn.Module] | None:
    """Find a tensor in a graph that is being recorded."""
    for recorder in recorders():
        slot = private.get_proxy_slot(tensor, recorder, None)
        if slot is not None:
            return slot.proxy.node, recorder.root
    return None


def leads_to(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Tell whether one traced tensor was computed from another, gradient or not."""
    first, last = (recorded(tensor) for tensor in (source, result))
    if first is None or last is None:
        return False
    seen: set[fx.Node] = set()
    stack = list(last[0].all_input_nodes)
    while stack:
        node = stack.pop()
        if node is first[0]:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


def original(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node that a traced tensor's numbers come from, seen through copies and views."""
    place = recorded(tensor)
    if place is None:
        return None
    node = place[0]
    while node.target in _KEEPING and _size(node) == _size(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
