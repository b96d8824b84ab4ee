"""Prepare a graph for running: new values of the state are copied to its tensors, which stay the
same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    module.recompile()


def accept_strides(module: fx.GraphModule) -> fx.GraphModule:
    """Make operators accept any strides.

    Kernels give some results other strides than torch's tracer expects: those of a convolution's
    gradients depend on the processor, and those of a loss's gradient are always contiguous.
    """
    for operator, function in ACCEPTING.items():
        for node in module.graph.find_nodes(op="call_function", target=operator):
            node.target = function
    module.recompile()
    return module


def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return ``aten.view``, of a copy if the strides do not allow a view."""
    try:
        return tensor.view(size)
    except RuntimeError:
        return tensor.reshape(size)


def native_group_norm(x: torch.Tensor, *others: Any) -> Any:
    (x,) = _in_one_format(x)
    return aten.native_group_norm.default(x, *others)


def native_group_norm_backward(grad: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    """Return the gradients. The kernel reads wrong numbers if two formats differ."""
    return aten.native_group_norm_backward.default(*_in_one_format(grad, x), *others)


def attention_backward(*operands: Any, **options: Any) -> Any:
    """Return the gradients of attention. The kernel reads wrong numbers if the elements of a row
    are not next to each other.
    """
    made = (
        each.contiguous() if isinstance(each, torch.Tensor) and each.stride()[-1:] != (1,) else each
        for each in operands
    )
    return _ATTENTION_BACKWARD(*made, **options)


def nll_loss2d_backward(grad: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    return aten.nll_loss2d_backward.default(grad, x.contiguous(), *others)


def _in_one_format(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return tensors that all have the same memory format, copies if theirs differ."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for each in (torch.contiguous_format, formats.get(tensors[0].dim())):
        if each and all(tensor.is_contiguous(memory_format=each) for tensor in tensors):
            return tensors
    return [tensor.contiguous() for tensor in tensors]


_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Of about fifty kernels that were tried with other strides, these fail, or compute wrong numbers.
ACCEPTING: dict[Any, Callable[..., Any]] = {
    aten.view.default: view,
    aten.native_group_norm.default: native_group_norm,
    aten.native_group_norm_backward.default: native_group_norm_backward,
    _ATTENTION_BACKWARD: attention_backward,
    aten.nll_loss2d_backward.default: nll_loss2d_backward,
}


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
