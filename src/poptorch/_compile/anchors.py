"""Tensors inside the program that come back to the host (PopTorch user guide, "Features").

Those of the forward and backward pass are outputs of the micro graph already; the weights after
their update are added here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from .._base.errors import Error
from .._ir import slots
from .._ir.graph import Graph, graph_module
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from ..enums import OutputMode

UPDATED = "UpdatedVar___"
Exceptions = tuple[tuple[str, OutputMode, int], ...]


def with_updated_weights(graph: Graph, spec: Spec) -> Graph:
    """Return the graph with ``UpdatedVar___<weight>`` among its results where it is anchored."""
    written = {
        f"{UPDATED}{slot.path}": at
        for at, slot in enumerate(graph.outputs)
        if slot.kind is Kind.PARAM
    }
    wanted = [(short, written[long]) for short, long, *_ in spec.anchors if long in written]
    if not wanted:
        return graph
    copied = graph.copy()
    (output,) = (node for node in copied.module.graph.nodes if node.op == "output")
    returned = copied.returned
    output.args = ((*returned, *(returned[at] for _, at in wanted)),)
    weights = ((short, graph.outputs[at]) for short, at in wanted)
    anchored = [slots.anchor(short, weight.shape, weight.dtype) for short, weight in weights]
    module = graph_module(copied.module, copied.module.graph)
    return Graph(graph.name, module, graph.inputs, (*graph.outputs, *anchored))


def emitted_anchors(graphs: Mapping[str, Graph], spec: Spec) -> tuple[tuple[Slot, ...], Exceptions]:
    """Return the slots of all anchors, in the user's order, and how each comes back.

    Raises:
        Error: an anchored name is no tensor of the model.
    """
    anchored = {
        slot.path: slot
        for graph in graphs.values()
        for slot in graph.outputs
        if slot.kind is Kind.ANCHOR
    }
    for short, long, *_ in spec.anchors:
        if short not in anchored:
            close = difflib.get_close_matches(long, _known(graphs), n=3)
            raise Error(
                f"No tensor with name {long} to anchor",
                got=f"anchorTensor({short!r}, {long!r})",
                fix=f"did you mean {' or '.join(close)}?"
                if close
                else "getTensorNames() of a compiled model lists the names",
            )
    slots = tuple(anchored[short] for short, *_ in spec.anchors)
    return slots, tuple(
        (anchored[short].key, mode, period) for short, _, mode, period in spec.anchors
    )


def _known(graphs: Mapping[str, Graph]) -> list[str]:
    params = {s.path for graph in graphs.values() for s in graph.inputs if s.kind is Kind.PARAM}
    return [f"{prefix}{path}" for path in sorted(params) for prefix in ("", "Gradient___", UPDATED)]
