"""How many micro-batches run side by side, and the capture with so many."""

from __future__ import annotations

import dataclasses
import os

from .. import _capture
from .._base import log
from .._ir.program import Axis, LaneAxis
from .._ir.slot import Kind, Slot
from .._ir.spec import Spec
from .._machine.liveness import peak_bytes

MOST_STEPS = 64  # more lanes than this were never faster, and their graphs compile no better
MOST_MEMORY = 1 << 30


def capture(request: _capture.Request, spec: Spec) -> tuple[_capture.Micro, LaneAxis | None]:
    """Capture with as many lanes as the memory budget allows, or one micro-batch.

    Returns:
        What was captured, and what its lanes are.
    """
    if spec.precision.floating_point_exceptions:  # they name the micro-batch
        return _capture.capture(request), None
    axis = Axis.ACCUMULATION if spec.training else Axis.ITERATIONS
    length = spec.loops.accumulation if spec.training else spec.loops.iterations
    steps = _first_choice(length, request, spec)
    budget = spec.lane_memory or _default_budget()
    while steps * spec.loops.replicas > 1:
        lanes = _capture.Lanes(steps, spec.loops.replicas)
        try:
            micro = _capture.capture(_with_lanes(request, lanes))
        except _capture.NotVectorisable as reason:
            log.engine.debug("Micro-batches run one after another: %s", reason)
            break
        peak = peak_bytes(micro.graph)
        if spec.lanes or peak <= budget:
            return micro, LaneAxis(axis, lanes.steps, lanes.replicas)
        log.engine.debug("%d lanes need %d bytes, more than %d", lanes.count, peak, budget)
        if steps == 1:
            break
        steps = _divisor(length, max(1, min(steps - 1, steps * budget // peak)))
    return _capture.capture(request), None


def _first_choice(length: int, request: _capture.Request, spec: Spec) -> int:
    if any(not slot.shape for slot in request.batch):
        return 0  # a 0-d input is never cut
    if spec.lanes:
        return _divisor(length, spec.lanes // spec.loops.replicas)
    return _divisor(length, MOST_STEPS)


def _divisor(length: int, most: int) -> int:
    return next((steps for steps in range(min(length, most), 0, -1) if length % steps == 0), 0)


def _default_budget() -> int:
    """Bytes: the most, halved until it fits into a quarter of what is free.

    In halves, because lanes are part of what compiled code is kept under: what is free at the
    moment, to the byte, must not be.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budget = MOST_MEMORY
    while budget > free // 4 and budget > 1:
        budget //= 2
    return budget


def _with_lanes(request: _capture.Request, lanes: _capture.Lanes) -> _capture.Request:
    own = set(_capture.batch_norm_statistics(request)) if lanes.replicas > 1 else set()
    return dataclasses.replace(
        request,
        lanes=lanes,
        batch=tuple(_leading(slot, lanes.count) for slot in request.batch),
        state=tuple(
            _leading(slot, lanes.replicas) if _evolves(slot, own) else slot
            for slot in request.state
        ),
    )


def _evolves(slot: Slot, paths: set[str]) -> bool:
    return slot.kind is Kind.BUFFER and slot.path in paths


def _leading(slot: Slot, size: int) -> Slot:
    return dataclasses.replace(slot, shape=(size, *slot.shape))
