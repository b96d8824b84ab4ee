"""Verify what a pass has made: its graphs, and the rules of layouts and programs."""

from __future__ import annotations

from .. import _capture
from .._ir import verify
from .._ir.graph import Graph
from .._ir.plan import Layout, Staged
from .._ir.program import Program
from .bundled_weights import FlatParameters
from .lanes import Batched
from .stage_graphs import OptimizerGraphs, SplitStep

PassResult = (
    _capture.Micro
    | Batched
    | Layout
    | FlatParameters
    | Program
    | OptimizerGraphs
    | SplitStep
    | Staged
    | None
)


def verify_made(made: PassResult, verified: set[Graph]) -> list[Graph]:
    """Verify a value, and return its graphs that were not verified before.

    A graph that a pass has taken over unchanged is not verified again.
    """
    graphs = [graph for graph in graphs_in(made) if graph not in verified]
    for graph in graphs:
        verify.verify_graph(graph)
        verified.add(graph)
    if isinstance(made, Layout):
        verify.verify_layout(made)
    elif isinstance(made, Program):
        verify.verify_body(made)
    return graphs


def graphs_in(made: PassResult) -> list[Graph]:
    if made is None:
        return []
    if isinstance(made, OptimizerGraphs):
        return [each for each in (made.accumulation, made.update) if each is not None]
    if isinstance(made, Program | SplitStep | Staged):
        return [*made.graphs.values()]
    return [made.micro.graph if isinstance(made, Batched) else made.graph]
