"""Random operators of lanes: each lane draws from a stream of its own."""

from __future__ import annotations

import torch
from torch import fx

from .._ir.graph import Graph
from .._ir.operators import draws
from .._ops import streams
from .lanes import NotVectorisable

aten = torch.ops.aten


def lane_by_lane(graph: Graph, lanes: int) -> Graph:
    """Return a graph in which each lane draws what it would draw alone."""
    if not graph.random:
        return graph
    graph = graph.copy()
    fxgraph = graph.module.graph
    for number, node in enumerate([node for node in fxgraph.nodes if draws(node)]):
        _replace(fxgraph, node, lanes, number)
    fxgraph.eliminate_dead_code()
    fxgraph.lint()
    graph.module.recompile()
    return graph


def _replace(graph: fx.Graph, node: fx.Node, lanes: int, number: int) -> None:
    """Put ``draw`` in the place of one of torch's operators."""
    drawn = streams.lane_by_lane(node.target, node.args)
    value = node.meta["val"]
    if drawn is None or value.shape[:1] != (lanes,):
        raise NotVectorisable(f"{node.target} cannot draw for each micro-batch by itself")
    like = node.args[0]
    with graph.inserting_before(node):
        if drawn[0] != streams.SHARES:
            kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            where = [*value.shape], [*value.stride()]
            like = graph.call_function(aten.empty_strided.default, where, kind)
            like.meta = {**node.meta}
        new = graph.call_function(streams.draw, (like, *drawn, lanes, number))
        new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)
