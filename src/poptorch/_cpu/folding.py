"""Fold factors and offsets of channels into the weights of the preceding product.

``(x w + b) s + t`` is ``x (w s) + (b s + t)`` if s and t have one number for each column of w. A
batch norm with given statistics has this form. The condition is checked on the graph: where each
value comes from, and that nothing else reads what is removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_CHANNELS = 1  # the dimension of products that contains the channels


def fold(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Rewrite a graph in which some values depend only on weights."""
    folding = _Folding(graph, fixed)
    for norm in graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_no_training.default
    ):
        folding.make_line(norm)
    for node in list(graph.nodes):
        folding.absorb(node)
    graph.eliminate_dead_code()


def call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add an operator before another one, with the same labels."""
    with like.graph.inserting_before(like):
        node = like.graph.call_function(target, args)
    node.meta = like.meta.copy()
    node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))
    return node


def is_float(*nodes: Any) -> bool:
    """Return whether all given values are tensors of float32."""
    values = [node.meta.get("val") for node in nodes if node is not None]
    return all(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in values)


class _Folding:
    def __init__(self, graph: fx.Graph, fixed: set[fx.Node]) -> None:
        self._fixed = fixed

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        node = call(like, target, *args)
        if self._fixed.issuperset(node.all_input_nodes):
            self._fixed.add(node)
        return node

    def make_line(self, norm: fx.Node) -> None:
        """Replace a batch norm with given statistics by a factor and an offset."""
        x, weight, bias, mean, variance, _, eps = norm.args
        read = {user.args[1] for user in norm.users}
        given = [each for each in (weight, bias, mean, variance) if each is not None]
        if read != {0} or not self._fixed.issuperset(given) or not is_float(x, *given):
            return
        factor = self._call(norm, aten.add.Tensor, variance, eps)
        factor = self._call(norm, aten.rsqrt.default, factor)
        if weight is not None:
            factor = self._call(norm, aten.mul.Tensor, factor, weight)
        offset = self._call(norm, aten.mul.Tensor, mean, factor)
        if bias is None:
            offset = self._call(norm, aten.neg.default, offset)
        else:
            offset = self._call(norm, aten.sub.Tensor, bias, offset)
        shape = [-1, *(1,) * (x.meta["val"].dim() - 2)]  # type: ignore[union-attr]
        factor, offset = (
            self._call(norm, aten.reshape.default, each, shape) for each in (factor, offset)
        )
        line = self._call(norm, aten.mul.Tensor, x, factor)
        line = self._call(norm, aten.add.Tensor, line, offset)
        for user in list(norm.users):
            user.replace_all_uses_with(line)
            norm.graph.erase_node(user)
        norm.graph.erase_node(norm)

    def absorb(self, node: fx.Node) -> None:
        """Fold a factor or an offset into a product that nothing else reads."""
        if node.target not in (aten.mul.Tensor, aten.add.Tensor) or node.kwargs:
            return
        pairs: Any = (node.args, node.args[::-1])
        for product, number in pairs:
            if isinstance(product, fx.Node) and self._takes(product, number, node):
                is_factor = node.target is aten.mul.Tensor
                change = self._scaled if is_factor else self._moved
                node.replace_all_uses_with(change(node, product, number))
                return

    def _takes(self, product: fx.Node, number: Any, node: fx.Node) -> bool:
        parts = operands(product)
        if parts is None or [*product.users] != [node] or number not in self._fixed:
            return False
        _, weight, bias = parts
        known = self._fixed.issuperset(each for each in (weight, bias) if each is not None)
        value, size = number.meta["val"], product.meta["val"].shape
        shape = (1,) * (len(size) - value.dim()) + value.shape
        per_channel = len(shape) == len(size) and all(
            n == (size[dim] if dim == _CHANNELS else 1) for dim, n in enumerate(shape)
        )
        return known and per_channel and is_float(product, weight, bias, number)

    def _scaled(self, node: fx.Node, product: fx.Node, factor: fx.Node) -> fx.Node:
        x, weight, bias = _known(product)
        ones = (1,) * (weight.meta["val"].dim() - 1) if _is_convolution(product) else ()
        of_weight = self._call(node, aten.reshape.default, factor, [-1, *ones])
        weight = self._call(node, aten.mul.Tensor, weight, of_weight)
        if bias is not None:
            factor = self._call(node, aten.reshape.default, factor, [-1])
            bias = self._call(node, aten.mul.Tensor, bias, factor)
        return self._like(node, product, x, weight, bias)

    def _moved(self, node: fx.Node, product: fx.Node, offset: fx.Node) -> fx.Node:
        x, weight, bias = _known(product)
        offset = self._call(node, aten.reshape.default, offset, [-1])
        bias = offset if bias is None else self._call(node, aten.add.Tensor, bias, offset)
        return self._like(node, product, x, weight, bias)

    def _like(self, node: fx.Node, product: fx.Node, x: Any, weight: Any, bias: Any) -> fx.Node:
        if _is_convolution(product):
            return self._call(node, product.target, x, weight, bias, *product.args[3:])
        if bias is None:
            return self._call(node, aten.mm.default, x, weight)
        return self._call(node, aten.addmm.default, bias, x, weight)


def operands(product: fx.Node) -> tuple[Any, Any, Any] | None:
    """Return the operand, the weight and the bias of a product; None for other operators."""
    match product:
        case fx.Node(target=aten.convolution.default, args=(x, weight, bias, *_, transposed, _, _)):
            return None if transposed else (x, weight, bias)
        case fx.Node(target=aten.addmm.default, args=(bias, x, weight)) if not product.kwargs:
            is_row = bias.meta["val"].shape == product.meta["val"].shape[1:]  # type: ignore[union-attr]
            return (x, weight, bias) if is_row else None
        case fx.Node(target=aten.mm.default, args=(x, weight)):
            return x, weight, None
    return None


def _known(product: fx.Node) -> tuple[Any, Any, Any]:
    parts = operands(product)
    assert parts is not None
    return parts


def _is_convolution(product: fx.Node) -> bool:
    return product.target is aten.convolution.default
