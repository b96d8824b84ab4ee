"""Micro graph + optimizer -> Staged: the program cut into one graph per part, and its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import _capture, _place, _schedule, _update
from .._ir.blocks import Visit
from .._ir.graph import Graph, compose
from .._ir.layout import Layout
from .._ir.optim_spec import OptimSpec
from .._ir.placement import Strategy
from .._ir.plan import Plan
from .._ir.program import Program
from .._ir.schedule import Do, Part, Work
from .._ir.slot import Kind
from .._ir.spec import Spec
from .._ir.staged import Moves, Segment, Staged, Transfer
from .build import update_graph
from .lower import lower

Segments = Mapping[Part, Segment]
Homes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Step:
    """What is cut: the micro step, with accumulators if there are any, and the update."""

    micro: Graph
    update: Graph | None


def step_graphs(
    micro: Graph, spec: Spec, optim: OptimSpec | None, program: Program | None = None
) -> Step:
    """Return the graphs of a program in which every replica has accumulators of its own.

    Args:
        micro: one micro-batch.
        spec, optim: the settings.
        program: the fused program, whose graphs are taken where they are the same.
    """
    if optim is None:
        return Step(micro, None)
    loops = spec.loops
    if program is not None and program.bundles:
        program = None  # on their chips weights rest apart
    if program is not None and "micro" in program.graphs and loops.replicas == 1:
        return Step(program.graphs["micro"], program.graphs["update"])
    tally = _update.Tally(chunks=loops.accumulation, summed=loops.replicas, replicas=loops.replicas)
    gradients = [slot for slot in micro.outputs if slot.kind is Kind.GRADIENT]
    trained = {slot.path for slot in gradients}
    params = [s for s in micro.inputs if s.kind is Kind.PARAM and s.path in trained]
    if tally.chunks == 1:
        piece = _update.scale(optim, gradients, spec.reduction, tally)
        step = micro
    else:
        piece = _update.finish(optim, gradients, spec.reduction, tally)
        piece_in = _update.accumulate(optim, gradients, spec.reduction, tally)
        accumulate = lower(piece_in, spec.precision.stochastic_rounding)
        step = compose("micro", [micro, accumulate])
    before = [lower(piece)] if piece is not None else []
    update, _ = update_graph(optim, params, before[0] if before else micro, spec)
    return Step(step, compose("update", [*before, update]))


def stage(step: Step, visits: Sequence[Visit], spec: Spec) -> Staged:
    """Cut a step into parts that run one by one, each on its chip, and schedule them.

    Accumulators and gradients are added up over the replicas before the update.
    """
    layout = _place.place(step.micro, visits, spec)
    segments = _place.split(layout, _recomputes(layout, spec))
    homes = dict(layout.homes)
    if step.update is not None:
        update_homes = _place.update_homes(step.update, homes)
        segments |= _place.split_update(step.update, update_homes)
        homes = _united(homes, update_homes)
    moves = _place.find_moves(segments, layout, spec.homes)
    work = _work(segments, layout, spec, moves)
    schedule = _schedule.make(work, layout.placement)
    _schedule.check(schedule, work)
    return Staged(segments, homes, tuple(_transfers(segments)), moves, work, schedule)


def _recomputes(layout: Layout, spec: Spec) -> bool:
    """Pipelined training computes activations again unless the user decides otherwise."""
    chosen = spec.hint("autoRecomputation")
    if chosen is not None:
        return bool(chosen)
    return layout.placement.strategy is Strategy.PIPELINED and len(layout.stages) > 1


def _united(first: Homes, second: Homes) -> dict[str, tuple[int, ...]]:
    keys = dict.fromkeys([*first, *second])
    return {key: tuple(sorted({*first.get(key, ()), *second.get(key, ())})) for key in keys}


def _work(segments: Segments, layout: Layout, spec: Spec, moves: Moves) -> Work:
    loops = spec.loops
    return Work(
        chips=tuple(stage.chip for stage in layout.stages),
        micros=loops.accumulation if layout.training else loops.iterations,
        training=layout.training,
        needs=_needs(segments),
        updates=_rounds([part for part in segments if part.do is Do.UPDATE]),
        loads=frozenset(moves.loads),
        stores=frozenset(moves.stores),
        fetches={part: _fetches(part, segments, moves) for part in moves.loads},
        phases=tuple(stage.phase for stage in layout.stages),
    )


def _needs(segments: Segments) -> dict[Part, frozenset[Part]]:
    makers = {key: part for part, segment in segments.items() for key in segment.writes}
    needs = {}
    for part, segment in segments.items():
        own = {Part(Do.FORWARD, part.index)} if part.do is Do.BACKWARD else set()
        if part.do is not Do.UPDATE:
            needs[part] = frozenset({makers[key] for key in segment.reads} | own)
    return needs


def _fetches(part: Part, segments: Segments, moves: Moves) -> frozenset[Part]:
    wanted = set(moves.loads[part])
    return frozenset(
        other
        for other, keys in moves.stores.items()
        if wanted & set(keys)
        and segments[other].chip == segments[part].chip
        # What the update stores is for the next time around; but rounds follow one another.
        and (other.do is not Do.UPDATE or (part.do is Do.UPDATE and other.round < part.round))
    )


def _rounds(parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    count = max((part.round + 1 for part in parts), default=0)
    return tuple(tuple(p.index for p in parts if p.round == number) for number in range(count))


def _transfers(segments: Segments) -> list[Transfer]:
    found = []
    for part, segment in segments.items():
        for slot in segment.graph.outputs:
            if slot.kind is not Kind.VALUE:
                continue
            readers = {s.chip for s in segments.values() if slot.key in s.reads}
            found += [Transfer(slot, part, chip) for chip in sorted(readers - {segment.chip})]
    return found


@_capture.forgetting_sources()
def with_stages(plan: Plan, request: _capture.Request, optim: OptimSpec | None) -> Plan:
    """Return a plan that also holds its staged form, for one micro-batch at a time.

    The model is captured again if the plan runs several micro-batches side by side.
    """
    spec, layout = plan.spec, plan.layout
    if layout is None or plan.program.lanes is not None:
        micro = _capture.capture(request)
        graph, visits = micro.graph, micro.visits
        layout = _place.place(graph, visits, spec)
        program = None
    else:
        graph, visits = layout.graph, tuple(item.visit for item in layout.assigned)
        program = plan.program
    staged = stage(step_graphs(graph, spec, optim, program), visits, spec)
    return replace(plan, layout=layout, staged=staged)
