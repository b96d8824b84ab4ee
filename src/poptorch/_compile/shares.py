"""Which part of a model each chip should get, from the captured graph alone."""

from __future__ import annotations

import collections
from dataclasses import replace

from .. import _capture, _place
from .._base.errors import Error
from .._base.tracing import one_at_a_time
from .._ir.graph import Graph
from .._ir.optim_spec import OptimSpec
from .._ir.placement import Strategy
from .._ir.slot import Kind
from .._ir.spec import Spec
from .._machine import systems
from .._machine.systems import ChipKind
from .estimate import Capture, updating_of
from .staged import step_graphs


@_capture.forgetting_sources()
def shares(
    request: _capture.Request, spec: Spec, optim: OptimSpec | None, chips: int, limit: int | None
) -> list[_place.Share]:
    """Capture a module and divide it over chips; annotations that it has are not looked at.

    Args:
        request: what is captured.
        spec: every setting.
        optim: the optimizer's structure, whose state counts; None in inference.
        chips: how many.
        limit: bytes that fit a chip; None for the memory of the system's chips.

    Raises:
        Error: the capture fails, or nothing fits.
    """
    micro = _capture.capture(request).graph
    kind = systems.current().kind
    update = step_graphs(micro, spec, optim).update
    return _balanced(request, micro, update, spec, kind, chips, limit)


@one_at_a_time()
def recut(captured: Capture, spec: Spec, kind: ChipKind, chips: int) -> Capture:
    """Return a captured model divided over chips as ``shares`` says, whatever blocks it had.

    Where nothing fits the memory it is divided as if there were enough.

    Args:
        captured: the model, in which nothing is computed again.
        spec: every setting.
        kind: of the chips.
        chips: how many.

    Raises:
        Error: there are fewer places to cut.
    """
    micro = captured.micro
    added = updating_of(captured, spec)
    update = None if added is None else added.update
    args = captured.request, micro.graph, update, spec, kind, chips
    try:
        made = _balanced(*args, None)
    except Error:  # raised again if it is not for want of memory
        made = _balanced(*args, 1 << 62)
    graph, visits = _place.cut_at(micro.graph, [share.begins or "" for share in made[1:]])
    return replace(captured, micro=replace(micro, graph=graph, visits=visits), pieces={})


def _balanced(
    request: _capture.Request,
    micro: Graph,
    update: Graph | None,
    spec: Spec,
    kind: ChipKind,
    chips: int,
    limit: int | None,
) -> list[_place.Share]:
    modules = [path for path, _ in request.module.named_modules()]
    units = _place.find_units(micro, _state_bytes(micro, update), modules, kind)
    pipelined = spec.training and spec.placement.strategy is Strategy.PIPELINED
    return _place.balance(units, chips, limit or kind.tiles * kind.tile_bytes, pipelined)


def _state_bytes(micro: Graph, update: Graph | None) -> dict[str, int]:
    """Bytes of each parameter and buffer, with its gradient and the optimizer's state for it."""
    total = collections.Counter[str]()
    for slot in (*micro.inputs, *(s for s in micro.outputs if s.kind is Kind.GRADIENT)):
        if slot.kind in (Kind.PARAM, Kind.BUFFER, Kind.GRADIENT):
            total[slot.path] += slot.bytes
    if update is not None:
        for slot in update.inputs:
            if slot.kind is Kind.OPTSTATE and slot.weight:
                total[slot.weight] += slot.bytes
    return total
