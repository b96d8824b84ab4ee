"""Capture, place and schedule a wrapped model, then price that: nothing is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import _capture, _place
from .._base.tracing import one_at_a_time
from .._ir.graph import Graph
from .._ir.optim_spec import OptimSpec
from .._ir.spec import Spec
from .._machine.constants import DEFAULT, Constants
from .._machine.cycles import Chip
from .._machine.estimate import Estimate
from .._machine.links import Fabric
from .._machine.priced import Subject
from .._machine.pricing import price
from .._machine.systems import System
from .._machine.work import work_of
from . import build, staged


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured model, of which many variants can be priced.

    Attributes:
        request: what was captured.
        micro: one micro-batch.
        optim: the optimizer's structure; None in inference.
        rows: of the combined batch of one process.
    """

    request: _capture.Request
    micro: _capture.Micro
    optim: OptimSpec | None
    rows: int


@one_at_a_time()
@_capture.forgetting_sources()
def capture_for_estimate(
    request: _capture.Request, spec: Spec, optim: OptimSpec | None, rows: int
) -> Capture:
    """Capture one micro-batch, on tensors without data.

    Args:
        request: what is captured.
        spec: every setting.
        optim: the optimizer's structure; None in inference.
        rows: of the combined batch of one process.
    """
    recompute = bool(spec.training and spec.recompute)
    why = "estimates look at one micro-batch at a time"
    micro = _capture.capture(replace(request, apart=why, recompute=recompute))
    return Capture(request, micro, optim, rows)


def estimate(
    captured: Capture,
    spec: Spec,
    system: System,
    constants: Constants = DEFAULT,
    guesses: bool = True,
) -> Estimate:
    """Place, cut, schedule and price a captured model.

    Args:
        captured: the model.
        spec: every setting; what the capture itself depends on is as it was captured.
        system: the chips.
        constants: of the cost model.
        guesses: find out how much each guess decides.

    Raises:
        Error: the annotations break a rule of placement.
    """
    return price(subject(captured, spec, system, constants), system.text, guesses)


def subject(
    captured: Capture, spec: Spec, system: System, constants: Constants = DEFAULT
) -> Subject:
    """Return what is priced: the program of one replica, and what joins the chips."""
    own = _one_replica(spec)
    layout = _place.place(captured.micro.graph, captured.micro.visits, own)
    graph = layout.graph
    step = staged.step_graphs(graph, own, captured.optim, by_example=True)
    cut = staged.stage(step, layout, own)
    io_tiles = spec.locations.io_tiles or 0
    chip = Chip(
        system.kind, system.kind.tiles - io_tiles, constants,
        _proportion(spec, constants), spec.runtime.half_partials,
    )  # fmt: skip
    fabric = Fabric(system.kind, max(1, layout.chips), spec.loops.all_replicas, constants)
    emit = build.emit(captured.micro.graph, own)
    rows = captured.rows * spec.loops.processes
    return Subject(cut, own, emit, chip, fabric, rows, _flops(graph), bool(captured.micro.overlaps))


def _one_replica(spec: Spec) -> Spec:
    """The settings of one replica, on a device without rules about reserving chips."""
    loops = replace(spec.loops, replicas=1, input_group_size=1, processes=1)
    target = replace(spec.target, device="model", auto_round=True)
    return replace(spec, loops=loops, target=target)


def _proportion(spec: Spec, constants: Constants) -> float:
    given = [share for _, share in spec.runtime.memory_proportions]
    return max(min(given, default=constants.memory_proportion), 0.01)


def _flops(graph: Graph) -> int:
    return sum(work_of(node).flops for node in graph.module.graph.nodes)
