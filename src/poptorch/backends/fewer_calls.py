"""Rewrite a prepared graph so that the interpreter makes fewer calls.

Results are bit-identical, except those of Adam's steps; see ``fused_steps``.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import fx

from .._ir.operators import is_pointwise, makes_elements, may_view, storage_root
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
        self.root = {node: storage_root(node) for node in graph.nodes}
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        for node, root in self.root.items():
            self._parts.setdefault(root, []).append(node)

    def readers(self, node: fx.Node) -> set[fx.Node]:
        return {user for part in self._parts[self.root[node]] for user in part.users}

    def compute_into(self, value: fx.Node, place: fx.Node, last: fx.Node) -> bool:
        """Compute a value in the memory of another one that nothing reads later, except
        for ``last``.
        """
        into = _writing(value, place)
        if into is None or self.root[value] is not value:
            return False
        shared = [n for n in value.all_input_nodes if self.root[n] is self.root[place]]
        late = any(self.order[n] > self.order[value] for n in self.readers(place) - {last})
        if late or any(node is not place for node in shared):
            # the second condition: elements are read at other positions than they are written
            return False
        value.target, value.kwargs = into, {**value.kwargs, "out": place}
        root = self.root[place]
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
        for operand in node.all_input_nodes if _has_form_that_writes(node) else ():
            fresh = _is_fresh(operand) and _is_fresh(storages.root[operand])
            if fresh and storages.compute_into(node, operand, node):
                break


def _is_fresh(node: fx.Node) -> bool:
    """Return whether an operator's result has new memory. Some operators return their operand."""
    if makes_elements(node):
        return node.target is not aten.conj_physical.default
    return node.target in _PRODUCTS


def _cannot_fail(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in STEPS or node.target in _CANNOT_FAIL:
        return True
    return is_pointwise(node) or may_view(node)


def _writing(node: fx.Node, place: fx.Node) -> Any:
    """Return the form of a pointwise operator that writes its result to a tensor of the
    same kind.
    """
    if not _has_form_that_writes(node):
        return None
    values = node.meta.get("val"), place.meta.get("val")
    own, kept = ((v.dtype, v.shape, v.stride()) if v is not None else None for v in values)
    if own is None or own != kept:
        return None
    return _out_form(node.target)


def _has_form_that_writes(node: fx.Node) -> bool:
    return makes_elements(node) and "out" not in node.kwargs


@functools.cache
def _out_form(target: Any) -> Any:
    """Return the form of an operator that writes its result to its argument ``out``, or None."""
    given = [(each.name, str(each.type)) for each in target._schema.arguments]
    for name in (f"{str(target).rpartition('.')[2]}_out", "out"):
        into = getattr(target.overloadpacket, name, None)
        if into is not None:
            taken = [(each.name, str(each.type)) for each in into._schema.arguments]
            if taken == [*given, ("out", "Tensor")]:
                return into
    return None
