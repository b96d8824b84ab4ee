"""Replace operators that write over a whole tensor with pure ones, without replaying the graph.

Batch norms write their statistics, and some activations write over their inputs. Nodes that read
the tensor later then read the new value. Replaying the graph to remove writes takes as long as
recording it did. That is still necessary if a view of a part of a tensor is written, or reads what
was written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._ir.operators import may_view, writes, written_by

aten = torch.ops.aten

IDENTITIES = {
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}  # fmt: skip
_BATCH_NORM = aten._native_batch_norm_legit.default
_PURE: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.lerp_.Tensor: aten.lerp.Tensor,
    aten.lerp_.Scalar: aten.lerp.Scalar,
    aten.addcmul_.default: aten.addcmul.default,
    aten.addcdiv_.default: aten.addcdiv.default,
    aten.clamp_.default: aten.clamp.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.sqrt_.default: aten.sqrt.default,
    aten.rsqrt_.default: aten.rsqrt.default,
    aten.neg_.default: aten.neg.default,
    aten.relu_.default: aten.relu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.silu_.default: aten.silu.default,
    _BATCH_NORM: aten._native_batch_norm_legit_functional.default,
}


def make_whole_writes_pure(graph: fx.Graph, mode: Any) -> None:
    """Replace all writes, or none if there are others, because then the graph is replayed."""
    writers = [node for node in graph.nodes if writes(node)]
    if not writers or any(node.target not in _PURE for node in writers):
        return
    wholes, parts = _memory(graph)
    last = {wholes.get(each): node for node in writers for each in written_by(node)}
    if None in last or any(root in last and node < last[root] for node, root in parts.items()):
        return
    results = {node: _pure_result(node, mode) for node in writers}
    if None not in results.values():
        _rewrite(graph, wholes, results)


def _memory(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Return, for each node, the node whose memory it shares: first for nodes that share all of
    it, then for nodes that share a part.
    """
    wholes, parts = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(first, fx.Node) and not may_view(first):
            wholes[node] = next(each for each in first.users if each.args == node.args)
        elif node.op != "call_function" or not may_view(node):
            wholes[node] = node
        elif isinstance(first, fx.Node):
            same = first in wholes and (node.target in IDENTITIES or writes(node))
            (wholes if same else parts)[node] = wholes[first] if first in wholes else parts[first]
    return wholes, parts


def _pure_result(node: fx.Node, mode: Any) -> Any:
    """Return the value without data of the pure operator; None if it is not that of the write."""
    inputs = [each.meta.get("val") for each in node.all_input_nodes]
    if any(getattr(each, "fake_mode", None) is not mode for each in inputs):
        return None
    args = fx.map_arg(node.args, lambda each: each.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda each: each.meta["val"])
    with mode, torch.no_grad():
        result = _PURE[node.target](*args, **kwargs)
    if node.target is _BATCH_NORM:
        before = [*node.meta["val"], *(each.meta["val"] for each in written_by(node))]
        return result if all(map(_are_alike, result, before)) else None
    return result if _are_alike(result, node.meta["val"]) else None


def _are_alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    kinds = [(each.shape, each.stride(), each.dtype, each.storage_offset()) for each in (one, two)]
    return kinds[0] == kinds[1]


def _rewrite(
    graph: fx.Graph, wholes: Mapping[fx.Node, fx.Node], results: Mapping[fx.Node, Any]
) -> None:
    """Let every node read the value that the memory of its operands has at this point."""
    now = dict[fx.Node, fx.Node]()

    def held(node: fx.Node) -> fx.Node:
        return now.get(wholes.get(node, node), node)

    for node in list(graph.nodes):
        targets = [wholes[each] for each in written_by(node)]
        node.args, node.kwargs = fx.map_arg(node.args, held), fx.map_arg(node.kwargs, held)
        if node not in results:
            continue
        node.target = _PURE[node.target]
        new = _statistics(node, results[node]) if len(targets) > 1 else [node]
        now.update(zip(targets, new, strict=True))


def _statistics(norm: fx.Node, result: Sequence[torch.Tensor]) -> list[fx.Node]:
    """Return nodes for the statistics that a pure batch norm returns."""
    made, last = [], norm
    while last.next.target is operator.getitem and last.next.args[0] is norm:
        last = last.next
    with norm.graph.inserting_after(last):
        for at in (4, 3):  # the later one is inserted first
            made.append(norm.graph.call_function(operator.getitem, (norm, at)))
            made[-1].meta = {**norm.meta, "val": result[at]}
    norm.meta = {**norm.meta, "val": tuple(result)}
    return made[::-1]
