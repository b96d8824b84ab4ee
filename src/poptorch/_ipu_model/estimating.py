"""Capture, place and schedule a wrapped model for an estimate, without compiling it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .. import _capture, _lanes, _place
from .._base.threads import one_at_a_time
from .._compile import build, passes, registry, staged
from .._compile.compilation import Compilation
from .._compile.eager_check import EagerCheck
from .._cost.links import Exchanged, Link
from .._cost.operations import flops_of
from .._ir.blocks import StagePass
from .._ir.loops import Loops
from .._ir.plan import Layout
from .._ir.program import Gather, Reduce, Scatter
from .._ir.spec import Locations, OptimSpec, Runtime, Spec
from .._systems import System
from .constants import Constants
from .estimate import Estimate
from .pass_cost import PricedPass
from .pricing import price
from .products import ChipModel
from .subject import Subject


@dataclass(frozen=True, eq=False)
class Pieces:
    """What variants of a captured model with other loop counts or locations share."""

    layout: Layout
    cut: staged.Cut
    passes: dict[StagePass, PricedPass]


@dataclass(frozen=True, eq=False)
class CapturedModel:
    request: _capture.Request
    micro: _capture.Micro  # one micro-batch
    optim: OptimSpec | None  # None in inference
    rows: int  # rows of the combined batch of one process
    flops: int = 0  # for one micro-batch, without recomputation
    pieces: dict[object, Pieces] = field(default_factory=dict)  # by everything that they depend on
    # What the optimizer adds, by everything that it depends on. Recomputation is not included.
    updating: dict[object, staged.Added] = field(default_factory=dict)

    def changed(self, **changes: Any) -> CapturedModel:
        return replace(self, micro=replace(self.micro, **changes), pieces={})


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
def recomputed(captured: CapturedModel) -> CapturedModel:
    return captured.changed(graph=_capture.recomputed(captured.micro.graph))


@one_at_a_time()
def with_fewer_checkpoints(captured: CapturedModel, every: int) -> CapturedModel:
    """Return the same model with only the last of every ``every`` checkpoints."""
    return captured.changed(graph=_capture.with_fewer_checkpoints(captured.micro.graph, every))


def estimate(captured: CapturedModel, spec: Spec, system: System, guesses: bool) -> Estimate:
    return price(subject(captured, spec, system), system.text, guesses)


def subject(captured: CapturedModel, spec: Spec, system: System) -> Subject:
    own = _one_replica(spec)
    pieces = _pieces(captured, own)
    c, tiles = Constants(), system.kind.tiles - (spec.locations.io_tiles or 0)
    model = spec.runtime.model_name or type(captured.request.module).__name__
    return Subject(
        staged.schedule(pieces.cut, pieces.layout, own), pieces.passes, own,
        build.emit(captured.micro.graph, own),
        ChipModel(system.kind, tiles, c, c.memory_proportion, spec.runtime.half_partials),
        max(1, pieces.layout.chips), spec.loops.all_replicas,
        captured.rows * spec.loops.processes, captured.flops, bool(captured.micro.overlaps),
        dict(spec.runtime.memory_proportions),
        f"{model}, {'training' if spec.training else 'inference'}",
    )  # fmt: skip


def _pieces(captured: CapturedModel, own: Spec) -> Pieces:
    """Place and cut, unless settings only differ in loop counts or locations."""
    key = captured.optim, replace(_shortest(own), locations=Locations(), runtime=Runtime())
    if key not in captured.pieces:
        layout = _place.place(captured.micro.graph, captured.micro.visits, own)
        cut = staged.cut(updating_of(captured, own), layout, own)
        passes = {each: PricedPass(each, graph) for each, graph in cut[0].items()}
        captured.pieces[key] = Pieces(layout, cut, passes)
    pieces = captured.pieces[key]
    _place.check_batches(pieces.layout.depth, len(pieces.layout.stages), own)
    return pieces


@one_at_a_time()
def exchanged(captured: CapturedModel, spec: Spec, link: Link) -> Exchanged:
    """Return what an update exchanges if such a link connects processes on different machines."""
    spec = replace(spec, target=replace(spec.target, link=(link.latency, link.bandwidth)))
    by_stages = registry.works_by_stages(registry.choose(spec.target.backend))
    unchecked, micro = EagerCheck.off(captured.request), captured.micro
    program = passes.run(
        Compilation(captured.request, spec, captured.optim, by_stages, unchecked, micro=micro),
        stop="build",
    ).program
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
    return Exchanged(tuple(early), tuple(late), tuple(gathered), left, spec.loops.iterations)


def _flops(graph: fx.Graph) -> int:
    return sum(flops_of(node) for node in graph.nodes)


def updating_of(captured: CapturedModel, spec: Spec) -> staged.Added:
    own = _shortest(_one_replica(spec))
    key = captured.optim, own.loops, own.reduction, own.precision
    if key not in captured.updating:
        made = staged.updating(captured.micro.graph, own, captured.optim, priced=True)
        captured.updating[key] = made
    return captured.updating[key]


def _one_replica(spec: Spec) -> Spec:
    """Return the settings of one replica, on a device without rules about reserving chips."""
    loops = Loops(spec.loops.iterations, spec.loops.accumulation)
    target = replace(spec.target, device="model", auto_round=True)
    return replace(spec, loops=loops, target=target)


def _shortest(spec: Spec) -> Spec:
    return replace(spec, loops=Loops(accumulation=min(spec.loops.accumulation, 2)))
