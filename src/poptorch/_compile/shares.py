"""Which part of a model each chip should get, from the captured graph alone."""

from __future__ import annotations

import collections

from .. import _capture, _place
from .._ir.graph import Graph
from .._ir.optim_spec import OptimSpec
from .._ir.placement import Strategy
from .._ir.slot import Kind
from .._ir.spec import Spec
from .._machine import systems
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
    modules = [path for path, _ in request.module.named_modules()]
    units = _place.find_units(micro, _state_bytes(micro, spec, optim), modules, kind)
    pipelined = spec.training and spec.placement.strategy is Strategy.PIPELINED
    return _place.balance(units, chips, limit or kind.tiles * kind.tile_bytes, pipelined)


def _state_bytes(micro: Graph, spec: Spec, optim: OptimSpec | None) -> dict[str, int]:
    """Bytes of each parameter and buffer, with its gradient and the optimizer's state for it."""
    total = collections.Counter[str]()
    for slot in (*micro.inputs, *(s for s in micro.outputs if s.kind is Kind.GRADIENT)):
        if slot.kind in (Kind.PARAM, Kind.BUFFER, Kind.GRADIENT):
            total[slot.path] += slot.bytes
    update = step_graphs(micro, spec, optim).update
    if update is not None:
        for slot in update.inputs:
            if slot.kind is Kind.OPTSTATE and slot.weight:
                total[slot.weight] += slot.bytes
    return total
