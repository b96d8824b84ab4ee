"""Compute an estimate: capture, place and schedule a wrapped model without compiling it, then price
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .. import _capture, _lanes, _place
from .._base.thread_safety import one_at_a_time
from .._compile import build, passes, registry
from .._compile.compilation import Compilation
from .._compile.eager_check_policy import EagerCheck
from .._compile.stage_graphs import OptimizerGraphs
from .._cost.links import Link, UpdateExchange
from .._cost.operations import flops_of
from .._ipu_systems import System
from .._ir.block_labels import StagePass
from .._ir.micro_batches import Loops
from .._ir.program import Gather, Reduce, Scatter
from .._ir.spec import Locations, OptimSpec, Runtime, Spec
from .constants import Constants
from .estimate import Estimate
from .pass_cost import PricedPass
from .pricing import price
from .product_planner import ChipModel
from .subject import Subject


@dataclass(frozen=True, eq=False)
class PricedSplit:
    """What variants of a captured model with other loop counts or locations share."""

    compilation: Compilation  # up to the pass "split"
    passes: dict[StagePass, PricedPass]


@dataclass(frozen=True, eq=False)
class CapturedModel:
    request: _capture.Request
    micro: _capture.Micro  # one micro-batch
    optim: OptimSpec | None  # None in inference
    rows: int  # rows of the combined batch of one process
    flops: int = 0  # for one micro-batch, without recomputation
    # By everything that they depend on.
    splits: dict[object, PricedSplit] = field(default_factory=dict)
    optimizer_graphs: dict[object, OptimizerGraphs] = field(default_factory=dict)

    def changed(self, **changes: Any) -> CapturedModel:
        return replace(self, micro=replace(self.micro, **changes), splits={})

    def compilation(self, spec: Spec) -> Compilation:
        """Return a compilation that goes on from the captured micro-batch."""
        request = replace(self.request, priced=True)
        unchecked = EagerCheck.off(request)
        return Compilation(request, spec, self.optim, True, unchecked, micro=self.micro)


@one_at_a_time()
@_capture.forgetting_sources()
def capture_for_estimate(
    request: _capture.Request, optim: OptimSpec | None, rows: int
) -> CapturedModel:
    """Capture one micro-batch on tensors without data, without recomputation."""
    micro = _capture.capture(replace(request, priced=True))
    if micro.exchanging and request.replicas > 1:
        why = "estimates consider one micro-batch at a time"
        raise _lanes.sequential_exchange(micro.graph, request.replicas, why)
    flops = _flops(micro.graph.module.graph)
    return CapturedModel(request, micro, optim, rows, flops)


@one_at_a_time()
def with_fewer_checkpoints(captured: CapturedModel, every: int) -> CapturedModel:
    """Return the same model with only the last of every ``every`` checkpoints."""
    return captured.changed(graph=_capture.with_fewer_checkpoints(captured.micro.graph, every))


def estimate(captured: CapturedModel, spec: Spec, system: System, guesses: bool) -> Estimate:
    return price(subject(captured, spec, system), system.text, guesses)


@one_at_a_time()
def subject(captured: CapturedModel, spec: Spec, system: System) -> Subject:
    own = _one_replica(spec)
    priced = _priced_split(captured, own)
    made = passes.run(replace(priced.compilation, spec=own), stop="schedule")
    assert made.staged is not None, "estimates are for stages"
    c, tiles = Constants(), system.kind.tiles - (spec.locations.io_tiles or 0)
    model = spec.runtime.model_name or type(captured.request.module).__name__
    return Subject(
        staged=made.staged,
        passes=priced.passes,
        spec=own,
        emit=build.emit(captured.micro.graph, own),
        chip=ChipModel(system.kind, tiles, c, c.memory_proportion, spec.runtime.half_partials),
        per_replica=max(1, made.layout.chips),
        replicas=spec.loops.all_replicas,
        rows=captured.rows * spec.loops.processes,
        flops=captured.flops,
        overlapped=bool(captured.micro.overlaps),
        proportions=dict(spec.runtime.memory_proportions),
        name=f"{model}, {'training' if spec.training else 'inference'}",
    )


def _priced_split(captured: CapturedModel, own: Spec) -> PricedSplit:
    """Place and split, unless settings only differ in loop counts or locations."""
    key = captured.optim, replace(_shortest(own), locations=Locations(), runtime=Runtime())
    if key not in captured.splits:
        given = captured.compilation(own).having("optimizer_graphs", graphs_of(captured, own))
        made = passes.run(given, stop="split")
        assert made.split_step is not None, "estimates are for stages"
        costs = {each: PricedPass(each, graph) for each, graph in made.split_step.graphs.items()}
        captured.splits[key] = PricedSplit(made, costs)
    priced = captured.splits[key]
    layout = priced.compilation.layout
    _place.check_batches(layout.depth, len(layout.stages), own)
    return priced


@one_at_a_time()
def exchanged(captured: CapturedModel, spec: Spec, link: Link) -> UpdateExchange:
    """Return what an update exchanges if such a link connects processes on different machines."""
    spec = replace(spec, target=replace(spec.target, link=(link.latency, link.bandwidth)))
    by_stages = registry.works_by_stages(registry.choose(spec.target.backend))
    given = replace(captured.compilation(spec), by_stages=by_stages)
    program = passes.run(given, stop="build").program
    early: list[float] = []
    late: list[tuple[float, ...]] = []
    gathered: list[float] = []
    for node in program.walk():
        if isinstance(node, Scatter):
            late.append(tuple(whole.bytes for whole, _ in node.pairs))
        elif isinstance(node, Gather):
            gathered += [shard.whole.slot.bytes for shard in node.shards]
        elif isinstance(node, Reduce):
            sizes = [bucket.slot.bytes for bucket in node.buckets]
            if node.waits:
                late.append(tuple(sizes))
            else:
                early += sizes
    work = {name: _flops(graph.module.graph) for name, graph in program.graphs.items()}
    left = work.get(build.LEFT, 0) / max(1, sum(work.values())) if early else 0.0
    return UpdateExchange(tuple(early), tuple(late), tuple(gathered), left, spec.loops.iterations)


def _flops(graph: fx.Graph) -> int:
    return sum(flops_of(node) for node in graph.nodes)


def graphs_of(captured: CapturedModel, spec: Spec) -> OptimizerGraphs:
    """Return what the optimizer adds, which does not depend on recomputation."""
    own = replace(_shortest(_one_replica(spec)), recompute=False)
    key = captured.optim, own.loops, own.reduction, own.precision
    if key not in captured.optimizer_graphs:
        made = passes.run(captured.compilation(own), stop="trace update").optimizer_graphs
        assert made is not None, "estimates are for stages"
        captured.optimizer_graphs[key] = made
    return captured.optimizer_graphs[key]


def _one_replica(spec: Spec) -> Spec:
    """Return the settings of one replica, on a device without rules about reserving chips."""
    loops = Loops(spec.loops.iterations, spec.loops.accumulation)
    target = replace(spec.target, device="model", auto_round=True)
    return replace(spec, loops=loops, target=target)


def _shortest(spec: Spec) -> Spec:
    return replace(spec, loops=Loops(accumulation=min(spec.loops.accumulation, 2)))
