"""Cutting a graph into one graph for each pass, between named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from .._ir import slots
from .._ir.blocks import StagePass
from .._ir.graph import Graph, graph_module, placeholder
from .._ir.slots import Slot

Inline = Callable[[fx.Node, StagePass], bool]


class Cutter:
    """Cuts a graph into passes that run one after another in their order.

    What a pass reads of another becomes a ``value.*`` between them. So does the old value of a
    state tensor that an earlier pass has changed by then.

    Args:
        graph: what is cut.
        passes: where every operator node runs.
        inline: whether a pass may compute a node of another pass again.
        copies: outputs that several passes compute and return, each the last that reads its own
            copy of the state; by slot key.
        fallback: the pass that returns an output which is an input of the whole graph.
    """

    def __init__(
        self,
        graph: Graph,
        passes: Mapping[fx.Node, StagePass],
        inline: Inline,
        copies: Mapping[str, Sequence[StagePass]],
        fallback: Callable[[Slot], StagePass],
    ) -> None:
        self._graph = graph
        self._passes = passes
        self._inline = inline
        self._order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
        self._inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self._results: dict[StagePass, list[tuple[Slot, fx.Node]]] = {}
        self._writer: dict[str, StagePass] = {}
        read = {slot.key for slot in graph.inputs if slot.is_state}
        for slot, node in zip(graph.outputs, graph.returned, strict=True):
            own = passes[node] if node in passes else fallback(slot)
            for writer in copies.get(slot.key, (own,)):
                self._results.setdefault(writer, []).append((slot, node))
            if slot.key in read and slot.key not in copies:
                self._writer[slot.key] = own

    def cut(self, passes: Collection[StagePass]) -> dict[StagePass, Graph]:
        """Return the graph of every pass, in their order."""
        own: dict[StagePass, list[fx.Node]] = {stage_pass: [] for stage_pass in sorted(passes)}
        for node, stage_pass in self._passes.items():
            own[stage_pass].append(node)
        reads = {each: self._closure(nodes, each) for each, nodes in own.items()}
        handed_on: dict[StagePass, dict[fx.Node, Slot]] = {each: {} for each in own}
        for _, values in reads.values():
            for node in values:
                handed_on[self._maker(node)][node] = self._value(node)
        return {each: self._extract(each, own[each], *reads[each], handed_on[each]) for each in own}

    def _maker(self, node: fx.Node) -> StagePass:
        """The pass that hands a value to others."""
        return self._passes[node] if node in self._passes else self._writer[self._inputs[node].key]

    def _closure(
        self, own: Collection[fx.Node], stage_pass: StagePass
    ) -> tuple[set[fx.Node], dict[fx.Node, None]]:
        """Return the nodes to compute again, and those whose results come from other passes."""
        mine, again, values = set(own), set[fx.Node](), dict[fx.Node, None]()
        stack = [i for node in own for i in node.all_input_nodes]
        stack += [node for _, node in self._results.get(stage_pass, ())]
        while stack:
            node = stack.pop()
            if node in mine or node in again or node in values:
                continue
            if node in self._inputs:
                if self._is_overwritten(node, stage_pass):
                    values[node] = None
            elif node.op == "get_attr" or self._inline(node, stage_pass):
                again.add(node)
                stack += node.all_input_nodes
            else:
                values[node] = None
        return again, dict.fromkeys(sorted(values, key=self._order.__getitem__))

    def _is_overwritten(self, placeholder: fx.Node, stage_pass: StagePass) -> bool:
        return stage_pass > self._writer.get(self._inputs[placeholder].key, stage_pass)

    def _extract(
        self,
        stage_pass: StagePass,
        own: Collection[fx.Node],
        again: Collection[fx.Node],
        values: Collection[fx.Node],
        handed_on: Mapping[fx.Node, Slot],
    ) -> Graph:
        nodes = sorted({*own, *again}, key=self._order.__getitem__)
        results = [
            *self._results.get(stage_pass, ()),
            *((s, node) for node, s in handed_on.items()),
        ]
        used = {i for node in nodes for i in node.all_input_nodes} | {node for _, node in results}
        reads = [(n, s) for n, s in self._inputs.items() if n in used and n not in values]
        reads += [(node, self._value(node)) for node in values]
        made = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node, slot in reads:
            mapping[node] = placeholder(made, slot.key)
            mapping[node].meta = {"val": node.meta.get("val")}
        for node in nodes:
            mapping[node] = made.node_copy(node, mapping.__getitem__)
        made.output(tuple(mapping[node] for _, node in results))
        module = graph_module(self._graph.module, made)
        return Graph(
            str(stage_pass), module, tuple(s for _, s in reads), tuple(s for s, _ in results)
        )

    def _value(self, node: fx.Node) -> Slot:
        name = self._graph.name
        if node in self._inputs:
            slot = self._inputs[node]
            return slots.value(f"{name}.old.{slot.key}", slot.shape, slot.dtype)
        result = node.meta["val"]
        assert isinstance(result, torch.Tensor), f"{node} passes no tensor on"
        return slots.value(f"{name}.{node.name}", tuple(result.shape), result.dtype)
