"""Prepare a graph for running: new values of the state are copied to its tensors, which stay the
same objects.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .._ir.graph import Graph, graph_module
from .._ir.operators import storage_root
from .._ir.slots import Kind, Slot

aten = torch.ops.aten


def written(graph: Graph) -> list[int | None]:
    """Return for each output the input that it replaces in place, or None for returned values."""
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
    module, places = without_writes(graph)
    write_last(module, places)
    return module


def without_writes(graph: Graph) -> tuple[fx.GraphModule, list[int]]:
    """Return a graph that returns its results and then the new values, and the inputs that these
    replace.
    """
    graph = graph.copy()
    (output,) = graph.module.graph.find_nodes(op="output")
    results, values, places = [], [], []
    roots: set[fx.Node] = set()  # values that are already returned
    for place, node in zip(written(graph), graph.returned, strict=True):
        root = storage_root(node)
        # An input, or a view of one, must be read before any write.
        shared = root.op == "placeholder" or (place is None and root in roots)
        own = _copy_before(graph.module.graph, node, output) if shared else node
        if place is None:
            roots.add(root)
            results.append(own)
        else:
            places.append(place)
            values.append(own)
    output.args = ((*results, *values),)
    return graph.module, places


def write_last(module: fx.GraphModule, places: Sequence[int]) -> None:
    """Copy the last results of a graph to its inputs, by number, at the end of the graph."""
    inputs = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    count = len(output.args[0]) - len(places)
    with module.graph.inserting_before(output):
        for place, value in zip(places, output.args[0][count:], strict=True):
            write = module.graph.call_function(aten.copy_.default, (inputs[place], value))
            write.meta["val"] = inputs[place].meta.get("val")
    output.args = (tuple(output.args[0][:count]),)
    module.graph.lint()
    module.recompile()


def accept_strides(module: fx.GraphModule) -> fx.GraphModule:
    """Make views accept any strides, because those of a convolution's gradients depend on the
    processor.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = view
    module.recompile()
    return module


def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return ``aten.view``, of a copy if the strides do not allow a view."""
    try:
        return tensor.view(size)
    except RuntimeError:
        return tensor.reshape(size)


def copy_half_results(module: fx.GraphModule) -> None:
    """Copy results in half precision. Otherwise torch's ONNX exporter returns sums and the like in
    float32, the type in which it computes them.
    """
    output = module.graph.output_node()

    def copied(node: fx.Node) -> fx.Node:
        is_half = node.meta["val"].dtype in (torch.float16, torch.bfloat16)
        return _copy_before(module.graph, node, output) if is_half else node

    output.args = fx.node.map_arg(output.args, copied)
    module.recompile()


def _copy_before(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copied = graph.call_function(aten.clone.default, (node,))
    copied.meta["val"] = node.meta.get("val")
    return copied


def for_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a graph for another device that was traced for the host."""
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
            setattr(moved, name, for_device(part, device))
    return moved
