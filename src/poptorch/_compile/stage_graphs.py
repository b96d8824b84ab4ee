"""Trace the optimizer, split a placed step into a graph for each stage pass, and schedule these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import _place, _schedule, _update
from .._base.errors import Error
from .._cost.seconds import core_seconds
from .._ir.block_labels import StagePass
from .._ir.graph import Graph, SlotFunction, compose
from .._ir.plan import Layout, Staged, Transfer, values_read, values_written
from .._ir.schedule import Workload
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec, Strategy
from .._ops.written_out import written_out
from .lower import Make, lower, lower_by_example, lower_update


@dataclass(frozen=True, eq=False)
class OptimizerGraphs:
    """What the optimizer adds to a micro-batch of a replica with its own accumulators."""

    accumulation: Graph | None = None  # None if there is only one micro-batch, and in inference
    update: Graph | None = None  # None in inference


@dataclass(frozen=True, eq=False)
class SplitStep:
    """A step that is split into stage passes. It does not depend on loop counts and locations."""

    graphs: Mapping[StagePass, Graph]
    homes: Mapping[str, tuple[int, ...]]  # chips that have each state tensor, by slot key


def trace_update(
    micro: Graph, spec: Spec, optim: OptimSpec | None, priced: bool
) -> OptimizerGraphs:
    """Trace what the optimizer adds; for an estimate, only one weight of each kind."""
    if optim is None:
        return OptimizerGraphs()
    loops = spec.loops
    accumulation = _update.Accumulation(
        optim, spec.reduction, 1, loops.accumulation, loops.all_replicas, loops.all_replicas
    )
    gradients = micro.gradients

    def traced(make: Make, slots: Sequence[Slot], stochastic: bool = False) -> Graph:
        if priced:
            return lower_by_example(make, slots, optim)
        return lower(make(slots), stochastic)

    rounding = spec.precision.stochastic_rounding
    adding, scale = None, accumulation.scale
    if loops.accumulation > 1:
        adding = traced(accumulation.accumulate, gradients, rounding)
        scale = accumulation.finish
    scaled = traced(scale, gradients)

    def make(weights: Sequence[Slot], over: OptimSpec = optim) -> SlotFunction:
        return _update.lower(over, weights, rounding)

    lowered = lower_by_example if priced else lower_update
    update = compose("update", [scaled, lowered(make, micro.trained, optim)])
    # Passes and their estimates only use operators that are known there.
    return OptimizerGraphs(adding, written_out(update))


def split(layout: Layout, optimizer: OptimizerGraphs, spec: Spec) -> SplitStep:
    micro = layout.graph
    if optimizer.accumulation is not None:
        micro = compose("micro", [micro, optimizer.accumulation])
    pipelined = spec.placement.strategy is Strategy.PIPELINED and len(layout.stages) > 1
    # if the user has decided, the pass "lanes" already does so
    recomputes = pipelined and spec.recompute is None
    graphs, homes = _place.split(micro, layout, spec.training, recomputes)
    if optimizer.update is not None:
        update_homes = _place.update_homes(optimizer.update, homes)
        graphs |= _place.split_update(optimizer.update, update_homes)
        both = {k: tuple(sorted({*homes.get(k, ()), *chips})) for k, chips in update_homes.items()}
        homes = {**homes, **both}
    return SplitStep(graphs, homes)


def check_shared_memory(made: SplitStep, layout: Layout, optim: OptimSpec | None) -> None:
    keys = {slot.path: slot.key for slot in layout.graph.inputs if slot.kind is Kind.PARAM}
    for same in optim.common if optim else ():
        if len({chip for path in same for chip in made.homes.get(keys.get(path, ""), ())}) > 1:
            raise Error(
                "Weights that share memory cannot be trained on several chips",
                got=" and ".join(f"'{path}'" for path in same),
                fix=("make them one parameter: b.weight = a.weight instead of b.weight.data = ..."),
            )


def schedule(made: SplitStep, layout: Layout, spec: Spec) -> Staged:
    graphs = made.graphs
    workload = Workload(
        stages=layout.stages,
        micro_batches=spec.loops.accumulation if spec.training else spec.loops.iterations,
        training=spec.training,
        needs=_needs(graphs),
        updates=tuple(stage_pass for stage_pass in graphs if stage_pass.is_update),
        streaming=_place.find_streaming(graphs, layout, spec),
    )
    order = _schedule.make(workload, spec.placement, spec.target.parts > 1)
    _schedule.check(order, workload)
    transfers = tuple(_transfers(graphs, workload))
    parts = _parts(workload.chips, spec.target.parts)
    work = {each: sum(map(core_seconds, graph.operators)) for each, graph in graphs.items()}
    return Staged(graphs, made.homes, transfers, workload, order, parts, work)


def _parts(chips: Sequence[int], processes: int) -> dict[int, int]:
    if len(chips) < processes:
        raise Error(
            "There are more processes per model than chips that the model uses",
            got=f"Distributed.stageProcesses({processes}); the stages are on {len(chips)} "
            f"{'chip' if len(chips) == 1 else 'chips'}",
            fix=(
                "place the blocks of the model on more chips: poptorch.Block('name', ipu_id=n)",
                "or use fewer processes: options.Distributed.stageProcesses(n)",
            ),
        )
    return {chip: at * processes // len(chips) for at, chip in enumerate(chips)}


def _needs(graphs: Mapping[StagePass, Graph]) -> dict[StagePass, frozenset[StagePass]]:
    makers = {key: each for each, graph in graphs.items() for key in values_written(graph)}
    needs = {}
    for stage_pass, graph in graphs.items():
        own = {StagePass(stage_pass.stage)} if stage_pass.backward else set()
        if not stage_pass.is_update:
            needs[stage_pass] = frozenset({makers[key] for key in values_read(graph)} | own)
    return needs


def _transfers(graphs: Mapping[StagePass, Graph], workload: Workload) -> list[Transfer]:
    reads = {stage_pass: values_read(graph) for stage_pass, graph in graphs.items()}
    transfers = []
    for stage_pass, graph in graphs.items():
        for slot in graph.outputs:
            if slot.kind is not Kind.VALUE:
                continue
            readers = {workload.chip_of(each) for each, keys in reads.items() if slot.key in keys}
            others = sorted(readers - {workload.chip_of(stage_pass)})
            transfers += [Transfer(slot, stage_pass, chip) for chip in others]
    return transfers
