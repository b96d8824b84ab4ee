"""Decide how many micro-batches run side by side, within the memory limit, and build their graph.

The number of lanes depends on rows, memory, and how much the last doubling saves. ``_lanes`` builds
the graph, and the check against eager PyTorch may reject it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import _capture, _lanes
from .._base import log
from .._base.resources import available_memory
from .._cost.live_bytes import peak_bytes, value_bytes
from .._cost.operations import rounds_of
from .._cost.seconds import BYTES_PER_SECOND, core_seconds
from .._ir import slots
from .._ir.conditions import Conditions
from .._ir.graph import Graph
from .._ir.micro_batches import Lanes
from .._ir.operators import may_view, storage_root
from .._ir.slots import Kind
from .._ir.spec import Spec
from .._ir.symbolic import sizes_of
from .eager_check_policy import EagerCheck

# Measured per micro-batch on two cores. Many rows at once do not fit the caches: the tutorial's CNN
# with 64 micro-batches of 16 takes 0.50 ms with 4 lanes, 0.81 with 32 and 1.24 with all; a
# ResNet-18 with 16 of 8 takes 12.2 ms with 4 and 15.4 with all. Models that fit the caches become
# faster with every lane: a perceptron with large weights and 32 of 16 takes 0.37 ms with 4 and 0.30
# with all.
MOST_ROWS = 64  # in one chunk, unless the intermediate values of more rows need little memory
CACHED = 4 << 20
MOST_STEPS = 64  # more lanes than this were never faster, and their graphs do not compile better
MOST_MEMORY = 1 << 30

# Users accumulate to save memory. If intermediate values take more than ``SAVED``, lanes are halved
# as long as the last doubling saves less than ``LEAST_GAIN``. Processor time of an update with 16
# micro-batches of 4, on one thread, with 4, 8 and 16 lanes: a small ResNet takes 251, 249 and 247
# ms (30, 58 and 115 MiB), a transformer 884, 807 and 853 ms (55, 110 and 219 MiB). A perceptron
# with large weights gains up to the last lane (18, 13 and 10 ms), and takes the same memory. Two
# threads gain more than this estimate: a ResNet with 4 micro-batches of 8 takes 57 ms with 2 lanes
# and 48 with 4 (69 MiB).
SAVED = 96 << 20
LEAST_GAIN = 0.1
# Costs of a run of compiled code that do not depend on the number of lanes: starting a kernel takes
# this many seconds, and weights are read from memory.
_CALL = 5e-6


@dataclass(frozen=True, eq=False)
class Batched:
    """What one run of a program's graph computes: one micro-batch, or several side by side."""

    micro: _capture.Micro
    lanes: Lanes | None = None  # what runs side by side, if anything


def choose(
    micro: _capture.Micro, request: _capture.Request, spec: Spec, check: EagerCheck
) -> Batched:
    """Return as many micro-batches side by side as are fast and fit the memory, or one."""
    length = spec.loops.accumulation if spec.training else spec.loops.iterations
    sequential = _why_sequential(request, spec)
    steps = 1 if sequential else _first_choice(length, request, spec)
    if sequential and not micro.exchanging:
        return one_by_one(micro, spec, sequential)
    try:
        saves = spec.training and not spec.lanes
        chosen = (_likely if saves else _within)(steps, length, micro, spec)
        more = 0 if spec.lanes or sequential else _more(chosen, steps, length, spec)
        chosen = _within(more, length, micro, spec) if more else chosen
        if saves:
            chosen = _saving(chosen, length, micro, spec)
        lanes, conditions = chosen.lanes, chosen.micro.conditions
        if conditions is not None:
            _check_sizes(conditions, request)
        if lanes is None or check.lanes(micro, chosen.micro.graph, lanes):
            return chosen
        reason = "side by side they compute different results"
    except _lanes.NotVectorisable as error:
        log.engine.debug("Micro-batches run one after another: %s", error)
        reason = str(error)
    return one_by_one(micro, spec, reason)


def _check_sizes(conditions: Conditions, request: _capture.Request) -> None:
    sizes = sizes_of(request.batch, [slot.shape for slot in request.batch])
    assert sizes is not None
    if not conditions.hold(sizes):
        raise _lanes.NotVectorisable(f"the sizes {sizes} do not satisfy {conditions}")


def one_by_one(micro: _capture.Micro, spec: Spec, why: str) -> Batched:
    if micro.exchanging and spec.loops.replicas > 1:
        raise _lanes.sequential_exchange(micro.graph, spec.loops.replicas, why)
    graph = _lanes.one_by_one(micro.graph, spec.loops.replicas)
    return Batched(_with_graph(micro, graph, spec))


def _with_graph(micro: _capture.Micro, graph: Graph, spec: Spec) -> _capture.Micro:
    recomputes = spec.training and spec.recompute
    return replace(micro, graph=_capture.recomputed(graph) if recomputes else graph)


def _side_by_side(micro: _capture.Micro, lanes: Lanes, spec: Spec) -> _capture.Micro:
    if micro.conditions is None:
        return _with_graph(micro, _lanes.side_by_side(micro.graph, lanes), spec)
    graph, conditions = _lanes.for_all_sizes(micro.graph, lanes)
    made = _with_graph(micro, graph, spec)
    return replace(made, conditions=micro.conditions | conditions)


def _within(steps: int, length: int, micro: _capture.Micro, spec: Spec) -> Batched:
    """Return this number of steps side by side, or fewer if the memory budget requires it."""
    budget = spec.lane_memory or default_budget()
    while steps * spec.loops.replicas > 1:
        lanes = Lanes(steps, spec.loops.replicas)
        made = _side_by_side(micro, lanes, spec)
        peak = peak_bytes(made.graph)
        if spec.lanes or peak <= budget or (steps == 1 and micro.exchanging):
            return Batched(made, lanes)
        log.engine.debug(
            "%d lanes need %d bytes, which is more than the limit of %d", lanes.count, peak, budget
        )
        if steps == 1:
            break
        steps = _divisor(length, max(1, min(steps - 1, steps * budget // peak)))
    return one_by_one(micro, spec, "they need too much memory side by side")


def _likely(steps: int, length: int, micro: _capture.Micro, spec: Spec) -> Batched:
    """Return the graph of this number of steps side by side, or of fewer if that saves memory.

    The result is that of ``_saving``. Building a graph takes about as long as the capture, so the
    number is first estimated from the memory of one micro-batch. The estimate may be wrong by a
    factor of two and is checked with the graph that was built.
    """
    choices = [steps]  # down to the first number whose last doubling gains enough
    while choices[-1] > 1 and _gain(choices[-1], length, micro) < LEAST_GAIN:
        choices.append(_divisor(length, choices[-1] // 2))

    shared = sum(slot.bytes for slot in micro.graph.gradients)

    def most(graph: Graph, count: int) -> int:
        """Return the largest choice within ``SAVED``, estimated from a graph of ``count`` lanes."""
        of_lane = max(0, peak_bytes(graph) - shared) / count
        room = (SAVED - shared) / spec.loops.replicas
        return next((each for each in choices if each * of_lane <= room), choices[-1])

    guess = most(micro.graph, 1)
    guessed = _within(guess, length, micro, spec)
    if guessed.lanes is None or guessed.lanes.steps != guess:
        return guessed
    right = most(guessed.micro.graph, guessed.lanes.count)
    return guessed if right <= guess else _within(right, length, micro, spec)


def _saving(chosen: Batched, length: int, micro: _capture.Micro, spec: Spec) -> Batched:
    """Return fewer lanes if they take much memory, and the last ones save little time."""
    while (lanes := chosen.lanes) is not None and lanes.steps > 1:
        if peak_bytes(chosen.micro.graph) <= SAVED:
            break
        gain = _gain(lanes.steps, length, micro)
        if gain >= LEAST_GAIN:
            break
        text = "The last doubling to %d lanes gains %.0f %%, too little for its memory"
        log.engine.debug(text, lanes.steps, 100 * gain)
        chosen = _within(_divisor(length, lanes.steps // 2), length, micro, spec)
    return chosen


def _gain(steps: int, length: int, micro: _capture.Micro) -> float:
    """Return the share of a micro-batch's time that doubling the steps to this number saves."""
    fewer = _divisor(length, steps // 2)
    return 1 - _seconds(micro.graph, steps) / _seconds(micro.graph, fewer)


def _seconds(graph: Graph, lanes: int) -> float:
    """Return an estimate of the seconds for each micro-batch with this number of lanes."""
    arguments = graph.arguments
    weights = {node for node, slot in arguments.items() if slot.kind is Kind.PARAM}
    added = sum(3 * slot.bytes for slot in graph.gradients)  # for adding to the accumulators
    once = added / BYTES_PER_SECOND
    for node in graph.operators:
        if not may_view(node):
            read = {
                root for each in node.all_input_nodes if (root := storage_root(each)) in weights
            }
            weights_read = sum(map(value_bytes, read)) / BYTES_PER_SECOND
            once += rounds_of(node) * (_CALL + weights_read)
    return sum(map(core_seconds, graph.operators)) + once / lanes


def _why_sequential(request: _capture.Request, spec: Spec) -> str | None:
    if any(not slot.shape for slot in request.batch):
        return "an input without dimensions cannot be divided"
    if spec.precision.floating_point_exceptions:
        return "floating-point exceptions are enabled and must name the micro-batch"
    if slots.LOSS_SCALE_FACTOR in request.loss_scaling:
        return "automatic loss scaling needs the gradients of each micro-batch"
    if spec.lanes and spec.lanes < spec.loops.replicas:
        return f"options.lanes({spec.lanes}) does not allow it"
    return None


def _first_choice(length: int, request: _capture.Request, spec: Spec) -> int:
    if spec.lanes:
        return _divisor(length, spec.lanes // spec.loops.replicas)
    rows = max((slot.shape[0] for slot in request.batch), default=1) * spec.loops.replicas
    return _divisor(length, max(1, MOST_ROWS // max(1, rows)))


def _more(chosen: Batched, least: int, length: int, spec: Spec) -> int:
    """Return how many more steps than chosen fit the caches; 0 if the chosen ones do not."""
    graph, lanes = chosen.micro.graph, chosen.lanes
    memory = min(CACHED, spec.lane_memory or default_budget())
    steps = 1 if lanes is None else lanes.steps
    if steps < least:
        return 0
    shared = sum(slot.bytes for slot in graph.gradients)
    of_lanes = max(1, peak_bytes(graph) - shared)
    more = _divisor(length, min(MOST_STEPS, steps * max(0, memory - shared) // of_lanes))
    return more if more > steps else 0


def _divisor(length: int, most: int) -> int:
    return next((steps for steps in range(min(length, most), 0, -1) if length % steps == 0), 0)


def default_budget() -> int:
    """Return the default number of bytes, halved until it is at most a quarter of the free memory.

    It is halved because compiled code is cached by lanes, which must not depend on every free byte.
    """
    free = available_memory()
    budget = MOST_MEMORY
    while budget > free // 4 and budget > 1:
        budget //= 2
    return budget
