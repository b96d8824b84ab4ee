"""Cutting a graph into groups of nodes, each a graph of its own between named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from .._ir.graph import Graph, identifier
from .._ir.slot import Kind, Slot

Inline = Callable[[fx.Node, int], bool]


class Cutter:
    """Cuts a graph into groups that run one after another in the order of their numbers.

    What a group reads of another becomes a ``value.*`` between them. So does the old value of a
    state tensor that an earlier group has changed by then.

    Args:
        graph: what is cut.
        groups: the group of every operator node.
        inline: whether a group may compute a node of another group again.
        copies: outputs that several groups compute and return, each the last that reads its own
            copy of the state; by slot key.
        fallback: the group that returns an output which is an input of the whole graph.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[fx.Node, int],
        inline: Inline,
        copies: Mapping[str, Sequence[int]],
        fallback: Callable[[Slot], int],
    ) -> None:
        self._graph = graph
        self._groups = groups
        self._inline = inline
        self._order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
        self._inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self._results: dict[int, list[tuple[Slot, fx.Node]]] = {}
        self._writer: dict[str, int] = {}
        read = {slot.key for slot in graph.inputs if slot.is_state}
        for slot, node in zip(graph.outputs, graph.returned, strict=True):
            group = groups[node] if node in groups else fallback(slot)
            for writer in copies.get(slot.key, (group,)):
                self._results.setdefault(writer, []).append((slot, node))
            if slot.key in read and slot.key not in copies:
                self._writer[slot.key] = group

    def cut(self, names: Mapping[int, str]) -> dict[int, Graph]:
        """Return the graph of every group that is named, in order."""
        own: dict[int, list[fx.Node]] = {group: [] for group in sorted(names)}
        for node, group in self._groups.items():
            own[group].append(node)
        reads = {group: self._closure(nodes, group) for group, nodes in own.items()}
        passed: dict[int, dict[fx.Node, Slot]] = {group: {} for group in own}
        for _, values in reads.values():
            for node in values:
                passed[self._maker(node)][node] = self._value(node)
        return {
            group: self._extract(names[group], own[group], *reads[group], passed[group], group)
            for group in own
        }

    def _maker(self, node: fx.Node) -> int:
        """The group that hands a value to others."""
        return self._groups[node] if node in self._groups else self._writer[self._inputs[node].key]

    def _closure(
        self, own: Collection[fx.Node], group: int
    ) -> tuple[set[fx.Node], dict[fx.Node, None]]:
        """Return the nodes to compute again, and those whose results come from other groups."""
        mine, again, values = set(own), set[fx.Node](), dict[fx.Node, None]()
        stack = [i for node in own for i in node.all_input_nodes]
        stack += [node for _, node in self._results.get(group, ())]
        while stack:
            node = stack.pop()
            if node in mine or node in again or node in values:
                continue
            if node in self._inputs:
                if self._is_overwritten(node, group):
                    values[node] = None
            elif node.op == "get_attr" or self._inline(node, group):
                again.add(node)
                stack += node.all_input_nodes
            else:
                values[node] = None
        return again, dict.fromkeys(sorted(values, key=self._order.__getitem__))

    def _is_overwritten(self, placeholder: fx.Node, group: int) -> bool:
        return group > self._writer.get(self._inputs[placeholder].key, group)

    def _extract(
        self,
        name: str,
        own: Collection[fx.Node],
        again: Collection[fx.Node],
        values: Collection[fx.Node],
        passed: Mapping[fx.Node, Slot],
        group: int,
    ) -> Graph:
        nodes = sorted({*own, *again}, key=self._order.__getitem__)
        results = [*self._results.get(group, ()), *((s, node) for node, s in passed.items())]
        used = {i for node in nodes for i in node.all_input_nodes} | {node for _, node in results}
        reads = [(n, s) for n, s in self._inputs.items() if n in used and n not in values]
        reads += [(node, self._value(node)) for node in values]
        made = fx.Graph()
        seen: list[str] = []
        mapping: dict[fx.Node, fx.Node] = {}
        for node, slot in reads:
            mapping[node] = made.placeholder(identifier(slot.key, seen))
            seen.append(slot.key)
            mapping[node].meta = {"val": node.meta.get("val")}
        for node in nodes:
            mapping[node] = made.node_copy(node, mapping.__getitem__)
        made.output(tuple(mapping[node] for _, node in results))
        module = fx.GraphModule(self._graph.module, made)
        return Graph(name, module, tuple(s for _, s in reads), tuple(s for s, _ in results))

    def _value(self, node: fx.Node) -> Slot:
        name = self._graph.name
        if node in self._inputs:
            slot = self._inputs[node]
            return Slot(Kind.VALUE, f"{name}.old.{slot.key}", slot.shape, slot.dtype)
        result = node.meta["val"]
        assert isinstance(result, torch.Tensor), f"{node} passes no tensor between groups"
        return Slot.like(Kind.VALUE, f"{name}.{node.name}", result)
