"""Rewrite a prepared graph so that the interpreter makes fewer calls.

Results are bit-identical, except those of Adam's steps; see ``fused_steps``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import torch
from torch import fx

from .._ir.graph import set_arguments
from .._ir.operators import (
    Operator,
    computes_elements,
    makes_elements,
    shares_memory,
    storage_roots,
)
from .fused_steps import STEPS, fuse_steps

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
# Whatever numbers these get, they compute a result.
_CANNOT_FAIL = {
    *_PRODUCTS, aten._to_copy.default, aten.amax.default, aten.amin.default, aten.clone.default,
    aten.copy_.default, aten.full.default, aten.linalg_vector_norm.default, aten.mean.default,
    aten.mean.dim, aten.ones_like.default, aten.scalar_tensor.default, aten.sum.default,
    aten.sum.dim_IntList, aten.zeros_like.default,
}  # fmt: skip


def with_fewer_calls(module: fx.GraphModule) -> fx.GraphModule:
    fuse_steps(module)
    _leave_out_transposes(module.graph)
    _compute_in_place(module.graph)
    module.recompile()
    return module


def _leave_out_transposes(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        (source,) = node.args
        if source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
    for node in reversed(graph.find_nodes(op="call_function", target=aten.t.default)):
        if not node.users:
            graph.erase_node(node)


class _Storages:
    """Records which values of a graph share memory, and when each is read last."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.root = storage_roots(graph.nodes)
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        for node, root in self.root.items():
            self._parts.setdefault(root, []).append(node)

    def readers(self, node: fx.Node) -> set[fx.Node]:
        return {user for part in self._parts[self.root[node]] for user in part.users}

    def compute_into(self, value: fx.Node, place: fx.Node, last: fx.Node) -> bool:
        """Compute a value in the memory of another one that nothing reads later, except
        for ``last``.
        """
        into, root = _form_that_writes(value.target), self.root[place]
        if into is None or self.root[value] is not value or not _are_alike(value, place):
            return False
        for operand in value.all_input_nodes:
            if operand is not place and self.root[operand] is root:
                return False  # elements are read at other positions than they are written
        readers = self.readers(place) - {last}
        if max(map(self.order.__getitem__, readers), default=0) > self.order[value]:
            return False
        value.target = into
        set_arguments(value, value.args, {**value.kwargs, "out": place})
        for part in self._parts.pop(value):
            self.root[part] = root
            self._parts[root].append(part)
        return True


def _compute_in_place(graph: fx.Graph) -> None:
    """Compute new values of state in place, and other values in the memory of operands that are no
    longer needed.

    State changes only after the last operator that may fail, so a failing call changes nothing.
    """
    storages = _Storages(graph)
    late = set(itertools.takewhile(_cannot_fail, reversed(graph.nodes)))
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        place, value = copy.args
        is_returned = any(user.op == "output" for user in storages.readers(value))
        if value in late and not is_returned and storages.compute_into(value, place, copy):
            graph.erase_node(copy)
    for node in graph.nodes:
        if node.op != "call_function" or _form_that_writes(node.target) is None:
            continue
        for operand in node.all_input_nodes:
            fresh = _is_fresh(operand) and _is_fresh(storages.root[operand])
            if fresh and storages.compute_into(node, operand, node):
                break


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and _makes_new_memory(node.target)


@functools.cache
def _makes_new_memory(target: Any) -> bool:
    if target is aten.conj_physical.default:  # it may return its operand
        return False
    return target in _PRODUCTS or makes_elements(target)


def _cannot_fail(node: fx.Node) -> bool:
    return node.op != "call_function" or _always_computes(node.target)


@functools.cache
def _always_computes(target: Any) -> bool:
    if target in STEPS or target in _CANNOT_FAIL or target is operator.getitem:
        return True
    return isinstance(target, Operator) and (computes_elements(target) or shares_memory(target))


def _are_alike(value: fx.Node, place: fx.Node) -> bool:
    one, two = value.meta.get("val"), place.meta.get("val")
    if one is None or two is None:
        return False
    return (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())


@functools.cache
def _form_that_writes(target: Any) -> Any:
    """Return the form of a pointwise operator that writes its result to its argument ``out``, or
    None.
    """
    if not makes_elements(target):
        return None
    given = [(each.name, str(each.type)) for each in target._schema.arguments]
    for name in (f"{str(target).rpartition('.')[2]}_out", "out"):
        into = getattr(target.overloadpacket, name, None)
        if into is not None:
            taken = [(each.name, str(each.type)) for each in into._schema.arguments]
            if taken == [*given, ("out", "Tensor")]:
                return into
    return None
