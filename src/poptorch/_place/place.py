"""micro Graph + the blocks it was captured with + the user's strategy -> Layout."""

from __future__ import annotations

from collections.abc import Sequence

from .._ir.blocks import Visit
from .._ir.graph import Graph
from .._ir.plan import Layout
from .._ir.spec import Spec
from .devices import check_batches, pipeline_depth, reserve
from .homes import find_homes
from .passes import with_passes
from .resolve import resolve
from .stages import group_visits


def place(graph: Graph, visits: Sequence[Visit], spec: Spec) -> Layout:
    """Decide on which chip and in which stage everything runs, and check the rules.

    Args:
        graph: the micro graph, labelled with visits.
        visits: the blocks that forward entered.
        spec: for the strategy, the loop counts and the target.

    Raises:
        Error: the annotations break a rule of PopTorch user guide, "Parallel execution".
    """
    placed = resolve(visits, spec.placement)
    stages, of_visit = group_visits(graph, placed, spec.placement)
    graph = with_passes(graph, of_visit, len(stages))
    is_empty = all(node.op != "call_function" for node in graph.module.graph.nodes)
    chips = 0 if is_empty else max(stage.chip for stage in stages) + 1
    depth = pipeline_depth(placed)
    check_batches(depth, len(stages), spec)
    homes = find_homes(graph, stages)
    return Layout(stages, homes, depth, chips, reserve(chips, spec), graph)
