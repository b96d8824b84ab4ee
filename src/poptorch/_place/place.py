"""micro Graph + the blocks it was captured with + the user's strategy -> Layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .._base import log
from .._ir.blocks import Visit
from .._ir.graph import Graph
from .._ir.layout import Layout, Spot, Stage
from .._ir.placement import Strategy
from .._ir.spec import Spec
from .devices import check_batches, pipeline_depth, reserve
from .homes import find_homes
from .resolve import resolve
from .spots import find_spots
from .stages import cut


def place(graph: Graph, visits: Sequence[Visit], spec: Spec) -> Layout:
    """Decide on which chip and in which stage everything runs, and check the rules.

    Args:
        graph: the micro graph, labelled with visits.
        visits: the blocks that forward entered.
        spec: for the strategy, the loop counts and the target.

    Raises:
        Error: the annotations break a rule of spec/parallel.md.
    """
    placement = spec.placement
    assigned = resolve(visits, placement)
    parts = cut(graph, assigned, placement)
    stages = parts.stages
    spots = find_spots(graph, parts.of_visit, len(stages))
    chips = _devices(stages, spots)
    depth = pipeline_depth(assigned)
    check_batches(depth, spec)
    pipelined = placement.strategy is Strategy.PIPELINED and chips > 1
    log.engine.debug("enablePipelining set to value %d", pipelined)
    if placement.phased:
        parallel = placement.strategy is Strategy.PARALLEL_PHASED
        log.engine.debug("executionPhaseSettings.phases set to value %d", placement.total_phases)
        log.engine.debug("executionPhaseSettings.stages set to value %d", 2 if parallel else 1)
    return Layout(
        graph=graph,
        placement=placement,
        visits=tuple(visits),
        stages=stages,
        spots=spots,
        homes=find_homes(graph, spots, stages),
        depth=depth,
        chips=chips,
        reserved=reserve(chips, spec),
        training=spec.training,
    )


def _devices(stages: Sequence[Stage], spots: Mapping[fx.Node, Spot]) -> int:
    if not spots:
        log.engine.info("No IPU is used: nothing is left of the model after optimisation")
        return 0
    return max(stage.chip for stage in stages) + 1
