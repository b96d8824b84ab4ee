"""Decide which part of a model each chip should get, from the captured graph alone."""

from __future__ import annotations

import collections
import functools

from .. import _capture, _ipu_systems, _place
from .._base.errors import Error
from .._base.thread_safety import one_at_a_time
from .._ipu_systems import ChipKind, System
from .._ir.graph import Graph
from .._ir.slots import Kind
from .._ir.spec import OptimSpec, Spec, Strategy
from .cycles import node_cycles
from .estimating import CapturedModel, estimate, graphs_of

ENOUGH = 1 << 62  # bytes that are always enough


@_capture.forgetting_sources()
def shares(
    request: _capture.Request, spec: Spec, optim: OptimSpec | None, chips: int, limit: int | None
) -> list[_place.ChipShare]:
    captured = CapturedModel(request, _capture.capture(request), optim, rows=0)
    return _balanced(captured, spec, _ipu_systems.current().kind, chips, limit)


@one_at_a_time()
def recut(captured: CapturedModel, spec: Spec, kind: ChipKind, chips: int) -> CapturedModel:
    """Return a captured model divided over chips. If memory is not sufficient, divide it as if it
    were.
    """
    try:
        return _divided(captured, spec, kind, chips, None)[1]
    except Error:  # raised again unless the reason is insufficient memory
        return _divided(captured, spec, kind, chips, ENOUGH)[1]


@one_at_a_time()
def fitting(
    captured: CapturedModel, spec: Spec, system: System, chips: int
) -> list[_place.ChipShare]:
    """Divide a captured model so that it fits according to ``poptorch.estimate``.

    If the fastest division does not fit, the fullest chip gets less, repeatedly.
    """
    system.check_size(spec.loops.all_replicas, chips)
    limit, culprit = ENOUGH, None
    while True:
        try:
            made, cut = _divided(captured, spec, system.kind, chips, limit)
        except Error as error:
            if culprit is None:
                raise
            raise Error(
                f"The model does not fit {chips} IPUs", got=str(culprit),
                fix="use more IPUs or smaller micro-batches; poptorch.estimate gives advice",
            ) from error  # fmt: skip
        priced = estimate(cut, spec, system, guesses=False)
        if priced.fits:
            return made
        culprit = priced.culprit
        limit = made[culprit.chip].bytes - 1


def _divided(
    captured: CapturedModel, spec: Spec, kind: ChipKind, chips: int, limit: int | None
) -> tuple[list[_place.ChipShare], CapturedModel]:
    made = _balanced(captured, spec, kind, chips, limit)
    begins = [share.begins or "" for share in made[1:]]
    graph, visits = _place.cut_at(captured.micro.graph, begins)
    return made, captured.changed(graph=graph, visits=visits)


def _balanced(
    captured: CapturedModel, spec: Spec, kind: ChipKind, chips: int, limit: int | None
) -> list[_place.ChipShare]:
    micro, update = captured.micro.graph, graphs_of(captured, spec).update
    modules = [path for path, _ in captured.request.module.named_modules()]
    cycles_of = functools.partial(node_cycles, kind=kind)
    units = _place.find_units(micro, _state_bytes(micro, update), modules, cycles_of)
    pipelined = spec.training and spec.placement.strategy is Strategy.PIPELINED
    return _place.balance(units, chips, limit or kind.tiles * kind.tile_bytes, pipelined)


def _state_bytes(micro: Graph, update: Graph | None) -> dict[str, int]:
    """Return the bytes of each parameter and buffer, with its gradient and optimizer state."""
    total = collections.Counter[str]()
    for slot in (*micro.inputs, *micro.gradients):
        if slot.kind in (Kind.PARAM, Kind.BUFFER, Kind.GRADIENT):
            total[slot.path] += slot.bytes
    if update is not None:
        for slot in update.inputs:
            if slot.kind is Kind.OPTSTATE and slot.weight:
                total[slot.weight] += slot.bytes
    return total
