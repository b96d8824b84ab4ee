"""The last step before code: new values are copied into the state's tensors, which stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .._ir.graph import Graph, graph_module
from .._ir.operators import storage_root
from .._ir.slots import Kind, Slot

aten = torch.ops.aten


def written(graph: Graph) -> list[int | None]:
    """For each output the input that it replaces in place, None for what is returned."""
    places = {slot.key: at for at, slot in enumerate(graph.inputs)}
    replacing = (slot.is_state or slot.kind is Kind.BATCH for slot in graph.outputs)
    return [
        places.get(slot.key) if yes else None
        for slot, yes in zip(graph.outputs, replacing, strict=True)
    ]


def returned(graph: Graph) -> list[Slot]:
    targets = zip(graph.outputs, written(graph), strict=True)
    return [slot for slot, target in targets if target is None]


def prepare(graph: Graph) -> fx.GraphModule:
    graph = graph.copy()
    fxgraph = graph.module.graph
    inputs = graph.placeholders
    output = next(node for node in fxgraph.nodes if node.op == "output")
    writes, results = [], []
    roots: set[fx.Node] = set()  # what is returned already
    for target, node in zip(written(graph), graph.returned, strict=True):
        if target is not None:
            writes.append((inputs[target], node))
            continue
        root = storage_root(node)
        shared = root.op == "placeholder" or root in roots
        roots.add(root)
        results.append(_own(fxgraph, node, output) if shared else node)
    with fxgraph.inserting_before(output):
        # A new value that is itself an input (or a view of one) must be read before any write.
        values = [
            _own(fxgraph, node, output) if storage_root(node).op == "placeholder" else node
            for _, node in writes
        ]
        for (place, _), value in zip(writes, values, strict=True):
            fxgraph.call_function(aten.copy_.default, (place, value))
    output.args = (tuple(results),)
    fxgraph.lint()
    graph.module.recompile()
    return graph.module


def accept_strides(module: fx.GraphModule) -> fx.GraphModule:
    """Let views take any strides: those of a convolution's gradients depend on the processor."""
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


def at_home(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a graph, which was traced for the host, for another device."""
    if device.type == "cpu":
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
    moved = graph_module(module, graph)
    for name, part in list(moved.named_children()):
        if isinstance(part, fx.GraphModule):  # the body of a loop or branch
            setattr(moved, name, at_home(part, device))
    return moved
