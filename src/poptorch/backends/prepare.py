"""The last step before code: state updates become writes into the device's tensors.

Rooms above hand over pure graphs. Here every new value of a state tensor is copied into that
tensor at the end of the graph, so that state keeps its identity and no call allocates it anew;
compilers turn the copy into a write in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .._ir.graph import Graph
from .._ir.operators import storage_root
from .._ir.slots import Kind, Slot

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class GraphSignature:
    """What a prepared graph takes, and what it returns rather than writes in place."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class Prepared(GraphSignature):
    """A graph ready for code, which writes state in place and returns the other outputs."""

    module: fx.GraphModule


def written(graph: Graph) -> list[int | None]:
    """For each output the input that it replaces in place, None for what is returned."""
    places = {slot.key: at for at, slot in enumerate(graph.inputs)}
    replacing = (slot.is_state or slot.kind is Kind.BATCH for slot in graph.outputs)
    return [
        places.get(slot.key) if yes else None
        for slot, yes in zip(graph.outputs, replacing, strict=True)
    ]


def signature(graph: Graph) -> GraphSignature:
    """Return what a graph takes and returns once it is prepared."""
    targets = zip(graph.outputs, written(graph), strict=True)
    return GraphSignature(graph.inputs, tuple(slot for slot, target in targets if target is None))


def prepare(graph: Graph) -> Prepared:
    """Return the graph with state updated in place; outputs have storage of their own."""
    graph = graph.copy()
    fxgraph = graph.module.graph
    inputs = graph.placeholders
    output = next(node for node in fxgraph.nodes if node.op == "output")
    writes, returned = [], []
    roots: set[fx.Node] = set()  # what is returned already
    for target, node in zip(written(graph), graph.returned, strict=True):
        if target is not None:
            writes.append((inputs[target], node))
            continue
        root = storage_root(node)
        shared = root.op == "placeholder" or root in roots
        roots.add(root)
        returned.append(_own(fxgraph, node, output) if shared else node)
    with fxgraph.inserting_before(output):
        # A new value that is itself an input (or a view of one) must be read before any write.
        values = [_own(fxgraph, n, output) if _views_input(n) else n for _, n in writes]
        for (place, _), value in zip(writes, values, strict=True):
            fxgraph.call_function(aten.copy_.default, (place, value))
    output.args = (tuple(returned),)
    fxgraph.lint()
    graph.module.recompile()
    return Prepared(graph.inputs, signature(graph).outputs, graph.module)


def accept_strides(module: fx.GraphModule) -> fx.GraphModule:
    """Let views of a graph take tensors of any strides; change it in place and return it.

    Graphs are traced on tensors without data. In what layout a convolution's backward pass returns
    its results depends on the processor, so that real strides may be others.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = view
    module.recompile()
    return module


def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """``aten.view``, of a copy where the strides leave no other way."""
    try:
        return tensor.view(size)
    except RuntimeError:
        return tensor.reshape(size)


def _own(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copied = graph.call_function(aten.clone.default, (node,))
    copied.meta["val"] = node.meta.get("val")
    return copied


def _views_input(node: fx.Node) -> bool:
    """Whether a value may share storage with a placeholder."""
    return storage_root(node).op == "placeholder"
