"""Recompute activations in the backward pass instead of storing them."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from .._ir.block_labels import forget_kept, is_kept, label_of, relabel
from .._ir.graph import Graph, copy_node, remove_dead_nodes
from .._ir.operators import is_mask, may_view
from .._ops.effects import is_control_flow, is_effect
from .._ops.identities import after_gradient


def recomputed(graph: Graph) -> Graph:
    graph = graph.copy()
    fxgraph = graph.module.graph
    forward = _forward(fxgraph)
    copies = _Copies(_kept(graph))
    inside = set(forward)
    for node in [node for node in fxgraph.nodes if node not in inside and node.op != "output"]:
        for source in node.all_input_nodes:
            if source in inside and source not in copies.kept:
                node.replace_input_with(source, copies.made_for(node, source))
        copies.seen(node)
    remove_dead_nodes(fxgraph)
    fxgraph.lint()
    graph.module.recompile()
    return graph


def checkpoints(graph: Graph) -> list[fx.Node]:
    nodes = _forward(graph.module.graph)
    return [n for n in nodes if is_kept(n) and n.target is not operator.getitem]


def with_fewer_checkpoints(graph: Graph, every: int) -> Graph:
    graph = graph.copy()
    for at, node in enumerate(checkpoints(graph), 1):
        if at % every:
            forget_kept(node)
    return graph


def _forward(graph: fx.Graph) -> list[fx.Node]:
    nodes = list(graph.nodes)
    first = next((at for at, node in enumerate(nodes) if label_of(node).backward), len(nodes))
    return nodes[:first]


def _kept(graph: Graph) -> set[fx.Node]:
    """Return the forward nodes to keep: their values are stored anyway, must not be computed twice,
    or are checkpoints.
    """
    nodes = graph.module.graph.nodes
    kept = set(graph.returned)
    for node in nodes:
        alive = node.op != "call_function" or is_kept(node)
        once = is_mask(node) or is_control_flow(node) or is_effect(node)
        if alive or once or any(_crosses(node, user) for user in node.users):
            kept.add(node)
    # A view of a stored value costs nothing, and a stored view keeps its base.
    for node in reversed(list(nodes)):
        if node in kept and node.op == "call_function" and may_view(node):
            kept.update(source for source in node.args[:1] if isinstance(source, fx.Node))
    for node in nodes:
        if node.op == "call_function" and may_view(node) and node.args[0] in kept:
            kept.add(node)
    return kept


def _crosses(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a value passes from one block to another. Values outside of blocks belong to
    their reader's block.
    """
    own_visit, user_visit = label_of(node).visit, label_of(user).visit
    return own_visit != user_visit and None not in (own_visit, user_visit)


class _Copies:
    def __init__(self, kept: set[fx.Node]) -> None:
        self.kept = kept
        self._copies: dict[fx.Node, fx.Node] = {}
        self._barriers: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self._gradients: dict[int | None, fx.Node] = {}
        self._first_gradient: fx.Node | None = None

    def seen(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._first_gradient = self._first_gradient or node
            self._gradients[label_of(node).visit] = node

    def made_for(self, reader: fx.Node, source: fx.Node) -> fx.Node:
        pending = [source]
        while pending:
            node = pending[-1]
            missing = [
                i for i in node.all_input_nodes if i not in self.kept and i not in self._copies
            ]
            if not missing:
                self._copy(node, reader)
                pending.pop()
            pending += missing
        return self._copies[source]

    def _copy(self, node: fx.Node, reader: fx.Node) -> None:
        if node in self._copies:
            return
        replaced = {i: self._copies.get(i, i) for i in node.all_input_nodes}
        if all(i in self.kept for i in node.all_input_nodes):
            replaced |= self._start(node, reader)
        with reader.graph.inserting_before(reader):
            copy = copy_node(reader.graph, node, replaced)
        own = label_of(node)
        own = label_of(reader) if own.visit is None else replace(own, backward=True)
        relabel(copy, replace(own, recomputed=True))
        self._copies[node] = copy

    def _start(self, node: fx.Node, reader: fx.Node) -> dict[fx.Node, fx.Node]:
        tensors = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), torch.Tensor)]
        gradient = self._available_values(reader)
        if not tensors or gradient is None:
            return {}
        source = next((i for i in tensors if i.op != "placeholder"), tensors[0])
        key = source, label_of(reader).visit
        if key not in self._barriers:
            with reader.graph.inserting_before(reader):
                barrier = reader.graph.call_function(after_gradient, (source, gradient))
            barrier.meta["val"] = source.meta["val"]
            relabel(barrier, label_of(reader))
            self._barriers[key] = barrier
        return {source: self._barriers[key]}

    def _available_values(self, reader: fx.Node) -> fx.Node | None:
        latest = self._gradients.get(label_of(reader).visit)
        reaching = (
            i
            for i in reader.all_input_nodes
            if label_of(i).backward and isinstance(i.meta.get("val"), torch.Tensor)
        )
        return latest or next(reaching, self._first_gradient)
