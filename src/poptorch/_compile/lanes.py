"""How many micro-batches run side by side, and the capture with so many."""

from __future__ import annotations

import dataclasses

from .. import _capture
from .._base import log
from .._base.resources import available_memory
from .._ipu_model.pass_cost import peak_bytes
from .._ir.loops import Lanes
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec

# Measured per micro-batch on two cores. Many rows at once leave the caches: the tutorial's
# CNN, 64 micro-batches of 16, takes 0.50 ms with 4 lanes, 0.81 with 32 and 1.24 with all; a
# ResNet-18, 16 of 8, 12.2 ms with 4 and 15.4 with all. What stays in the caches gains from every
# lane: a perceptron with large weights, 32 of 16, 0.37 ms with 4 and 0.30 with all.
MOST_ROWS = 64  # of one chunk, unless so little memory holds the intermediate values of more
CACHED = 4 << 20
MOST_STEPS = 64  # more lanes than this were never faster, and their graphs compile no better
MOST_MEMORY = 1 << 30

Captured = tuple[_capture.Micro, Lanes | None]


def capture(request: _capture.Request, spec: Spec) -> Captured:
    """Capture with as many lanes as are fast and the memory budget allows, or one micro-batch."""
    if any(not slot.shape for slot in request.batch):
        return _one(request, "an input without dimensions is never cut"), None
    if spec.precision.floating_point_exceptions:
        return _one(request, "floating-point exceptions name the micro-batch"), None
    kept_apart = _kept_apart(request, spec)
    if kept_apart is not None:
        return _one_or_replicas(request, spec, kept_apart)
    budget = spec.lane_memory or default_budget()
    length = spec.loops.accumulation if spec.training else spec.loops.iterations
    steps = _first_choice(length, request, spec)
    try:
        captured = _within(budget, steps, length, request, spec)
        more = 0 if spec.lanes else _more(min(CACHED, budget), captured, length)
        return _within(budget, more, length, request, spec) if more else captured
    except _capture.NotVectorisable as error:
        reason = str(error)
    log.engine.debug("Micro-batches run one after another: %s", reason)
    return _one(request, reason), None  # outside: its errors are not about this one


def _within(
    budget: int, steps: int, length: int, request: _capture.Request, spec: Spec
) -> Captured:
    """Capture with so many steps side by side, or as many fewer as the budget asks for."""
    while steps * spec.loops.replicas > 1:
        lanes = Lanes(steps, spec.loops.replicas)
        micro = _capture.capture(_with_lanes(request, lanes))
        peak = peak_bytes(micro.graph)
        if spec.lanes or peak <= budget or (steps == 1 and micro.exchanging):
            return micro, lanes
        log.engine.debug("%d lanes need %d bytes, more than %d", lanes.count, peak, budget)
        if steps == 1:
            break
        steps = _divisor(length, max(1, min(steps - 1, steps * budget // peak)))
    return _one(request, "they need too much memory side by side"), None


def _kept_apart(request: _capture.Request, spec: Spec) -> str | None:
    if request.grouped:
        return "each replica has weights of its own"
    if request.anchors:
        return "tensors are anchored"
    if spec.lanes and spec.lanes < spec.loops.replicas:
        return f"lanes({spec.lanes}) keeps them apart"
    return None


def _one_or_replicas(request: _capture.Request, spec: Spec, why: str) -> Captured:
    """Capture one micro-batch, or one of each replica where replicas exchange something."""
    try:
        return _one(request, why), None
    except _capture.ReplicasApart:
        lanes = Lanes(1, spec.loops.replicas)
    try:
        return _capture.capture(_with_lanes(request, lanes)), lanes
    except _capture.NotVectorisable as error:
        return _one(request, str(error)), None


def _one(request: _capture.Request, why: str) -> _capture.Micro:
    return _capture.capture(dataclasses.replace(request, apart=why))


def _first_choice(length: int, request: _capture.Request, spec: Spec) -> int:
    if spec.lanes:
        return _divisor(length, spec.lanes // spec.loops.replicas)
    rows = max((slot.shape[0] for slot in request.batch), default=1) * spec.loops.replicas
    return _divisor(length, max(1, MOST_ROWS // max(1, rows)))


def _more(memory: int, captured: Captured, length: int) -> int:
    """How many more steps so many bytes hold than were captured; 0 if they do not."""
    micro, lanes = captured
    steps = 1 if lanes is None else lanes.steps
    shared = sum(slot.bytes for slot in micro.graph.outputs if slot.kind is Kind.GRADIENT)
    of_lanes = max(1, peak_bytes(micro.graph) - shared)
    more = _divisor(length, min(MOST_STEPS, steps * max(0, memory - shared) // of_lanes))
    return more if more > steps else 0


def _divisor(length: int, most: int) -> int:
    return next((steps for steps in range(min(length, most), 0, -1) if length % steps == 0), 0)


def default_budget() -> int:
    """Bytes: the most, halved until it fits into a quarter of what is free.

    In halves, as compiled code is kept under lanes, which must not follow every free byte.
    """
    free = available_memory()
    budget = MOST_MEMORY
    while budget > free // 4 and budget > 1:
        budget //= 2
    return budget


def _with_lanes(request: _capture.Request, lanes: Lanes) -> _capture.Request:
    own = set(_capture.batch_norm_statistics(request)) if lanes.replicas > 1 else set()
    return dataclasses.replace(
        request,
        lanes=lanes,
        batch=tuple(_side_by_side(slot, lanes.count) for slot in request.batch),
        state=tuple(
            dataclasses.replace(_side_by_side(slot, lanes.replicas), replicas=lanes.replicas)
            if slot.kind is Kind.BUFFER and slot.path in own
            else slot
            for slot in request.state
        ),
    )


def _side_by_side(slot: Slot, size: int) -> Slot:
    return dataclasses.replace(slot, shape=(size, *slot.shape), lanes=True)
