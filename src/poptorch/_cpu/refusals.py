"""Check values that eager kernels refuse but compiled code would accept, with additional nodes."""

from __future__ import annotations

from torch import fx

from .._ir import indices
from .._ir.graph import graph_module
from .._ops.traceable import within


def refusing(module: fx.GraphModule) -> fx.GraphModule:
    """Make a graph raise errors where eager kernels would raise them."""
    found = list(indices.refusals(module.graph))
    if not found:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for original, refusal in found:
        node = copies[original]
        operand = node.args[refusal.place]
        assert isinstance(operand, fx.Node)
        limits = float(refusal.least), float(refusal.most), refusal.zero
        with graph.inserting_before(node):
            checked = graph.call_function(within, (operand, *limits, node.name))
        checked.meta["val"] = operand.meta["val"]
        node.update_arg(refusal.place, checked)
    return graph_module(module, graph)
