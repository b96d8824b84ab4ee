"""micro Graph + the blocks it was captured with + the user's strategy -> Layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .._ir.blocks import Visit
from .._ir.graph import Graph
from .._ir.layout import Layout, Spot, Stage
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
        Error: the annotations break a rule of PopTorch user guide, "Parallel execution".
    """
    placement = spec.placement
    assigned = resolve(visits, placement)
    parts = cut(graph, assigned, placement)
    stages = parts.stages
    spots = find_spots(graph, parts.of_visit, len(stages))
    chips = _devices(stages, spots)
    depth = pipeline_depth(assigned)
    check_batches(depth, spec)
    return Layout(
        graph=graph,
        placement=placement,
        assigned=tuple(assigned),
        stages=stages,
        spots=spots,
        homes=find_homes(graph, spots, stages),
        depth=depth,
        chips=chips,
        reserved=reserve(chips, spec),
        replicas=spec.loops.replicas,
        training=spec.training,
    )


def _devices(stages: Sequence[Stage], spots: Mapping[fx.Node, Spot]) -> int:
    return max(stage.chip for stage in stages) + 1 if spots else 0
