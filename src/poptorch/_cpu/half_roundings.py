"""Find values whose rounding to half precision decides what a program computes from them.

By default, torch's compiler leaves out a rounding if one kernel computes the value and what reads
it. A difference to the rounded value, as in compensated summation, is then zero. Such differences
are found if a program converts a value to half precision and back, or if it computes in half
precision. Other results only differ by about as much as the rounding of half precision itself.
These include float16 products of float16 products, which programs compute in float32: nothing else
reads the value before its rounding.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .._ir.operators import IN_SINGLE, RESHAPES, is_pointwise, reachable

aten = torch.ops.aten

_MOVES = RESHAPES | {
    aten.clone.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
}
_CONVERSIONS = {aten._to_copy.default, aten.copy.default, aten.copy_.default}
_HALVES = {torch.float16, torch.bfloat16}


def rounds_to_half(graph: fx.Graph) -> bool:
    """Return whether such a value is in a graph."""
    return _converts_back(graph) or any(map(_is_remainder, graph.nodes))


def _converts_back(graph: fx.Graph) -> bool:
    """Return whether a conversion from float32 to half precision is followed by its reverse, other
    than between two products.
    """
    rounded: dict[fx.Node, fx.Node] = {}  # and the values before they were rounded
    for node in graph.nodes:
        if not node.all_input_nodes or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        source = node.all_input_nodes[0]
        if node.target is aten._to_copy.default:
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if before == torch.float32 and after in _HALVES:
                rounded[node] = source
            elif after == torch.float32 and source in rounded:
                between_products = _is_product_of_halves(rounded[source]) and _is_factor(node)
                if not between_products:
                    return True
        elif node.target in _MOVES and source in rounded:
            rounded[node] = rounded[source]
    return False


def _is_product_of_halves(result: fx.Node) -> bool:
    """Return whether a result in float32 is that of a float16 product, and only read to be
    rounded.
    """
    product = result.all_input_nodes[0] if result.target is operator.getitem else result
    widened = any(map(_is_widened, product.all_input_nodes))
    return product.target in IN_SINGLE and widened and len(result.users) == 1


def _is_widened(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    return bool(node.all_input_nodes[0].meta["val"].dtype == torch.float16)


def _is_factor(node: fx.Node) -> bool:
    return all(user.target in IN_SINGLE for user in node.users)


def _is_remainder(node: fx.Node) -> bool:
    """Return whether a node subtracts a value from another one that is computed from it, element by
    element and in half precision, as ``(a + b) - a`` does.
    """
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    if node.target is not aten.sub.Tensor or len(operands) < 2:
        return False
    one, other = operands
    return _rounds_between(one, other) or _rounds_between(other, one)


def _rounds_between(result: fx.Node, source: fx.Node) -> bool:
    before = reachable([result], _operands)
    return result is not source and source in before and any(map(_rounds, before - {source}))


def _operands(node: fx.Node) -> list[fx.Node]:
    by_element = is_pointwise(node) or node.target in _MOVES
    return node.all_input_nodes if by_element else []


def _rounds(node: fx.Node) -> bool:
    value = node.meta.get("val")
    in_half = isinstance(value, torch.Tensor) and value.dtype in _HALVES
    return in_half and is_pointwise(node) and node.target not in _CONVERSIONS
