"""Factors and offsets of channels go into the weights of the product before them.

``(x w + b) s + t`` is ``x (w s) + (b s + t)`` where s and t have a number for each column of w, and
a batch norm with given statistics is such a line. Proof: where each value comes from, and that
nothing else reads what disappears.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_CHANNELS = 1  # the dimension of products that counts them


def fold(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Rewrite a graph, of which some values depend on weights alone."""
    folding = _Folding(graph, fixed)
    for norm in graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_no_training.default
    ):
        folding.make_line(norm)
    for node in list(graph.nodes):
        folding.absorb(node)
    graph.eliminate_dead_code()


def call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add an operator before another one, labelled like it."""
    with like.graph.inserting_before(like):
        node = like.graph.call_function(target, args)
    node.meta = like.meta.copy()
    node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))
    return node


def is_float(*nodes: Any) -> bool:
    """Whether all that are given are tensors of float32."""
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
        """Put a factor and an offset in the place of a batch norm with given statistics."""
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
        """Let a product that nothing else reads absorb a factor or an offset."""
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
    """Return what is multiplied by which weight, and the bias; None for other operators."""
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
