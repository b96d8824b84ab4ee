"""SlotFunction -> Graph: tracing the pure functions that other rooms hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from .._capture import trace
from .._ir.graph import Graph, SlotFunction, graph_module, placeholder
from .._ir.slots import Slot
from .._ir.spec import OptimSpec


def lower(source: SlotFunction, stochastic: bool = False, runs: bool = True) -> Graph:
    keys = [slot.key for slot in source.inputs]

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = source.function(dict(zip(keys, tensors, strict=True)))
        return [results[slot.key] for slot in source.outputs]

    mode = trace.fake_mode()
    inputs = [trace.fake_tensor(mode, slot.shape, slot.dtype) for slot in source.inputs]
    module, constants = trace.trace(flat, inputs, stochastic=stochastic and runs, runs=runs)
    assert not constants, f"{source.name} captured tensors of its surroundings"
    return Graph(source.name, module, source.inputs, source.outputs)


Make = Callable[[Sequence[Slot]], SlotFunction]


class Examples:
    """Weights of one group, shape and type, one of which stands for all."""

    def __init__(self, optim: OptimSpec, gradients: Sequence[Slot]) -> None:
        group = {path: at for at, each in enumerate(optim.groups) for path in each.params}
        self._like: dict[str, list[str]] = {}
        first: dict[object, str] = {}
        for slot in gradients:
            kind = (group.get(slot.weight), slot.shape, slot.dtype)
            example = first.setdefault(kind, slot.weight)
            self._like.setdefault(example, []).append(slot.weight)

    def graph(self, make: Make, slots: Sequence[Slot], stochastic: bool = False) -> Graph:
        if not self._like:
            return lower(make(slots), stochastic)
        few = lower(make([s for s in slots if s.weight in self._like]), stochastic, runs=False)
        whole = make(slots)
        weights = _weights(few)
        if any(len(each) > 1 for each in weights.values()):
            return lower(whole, stochastic, runs=False)
        copies = _Copies(few, whole, weights)
        copies.add("", "")
        for example, likes in self._like.items():
            for weight in likes:
                copies.add(example, weight)
        return copies.graph()


class _Copies:
    def __init__(
        self, few: Graph, whole: SlotFunction, weights: dict[fx.Node, frozenset[str]]
    ) -> None:
        self._few, self._whole = few, whole
        self._made = fx.Graph()
        self._inputs = {slot.key: placeholder(self._made, slot.key) for slot in whole.inputs}
        self._own: dict[str, list[fx.Node]] = {}
        for node, of in weights.items():
            if node.op != "placeholder":
                self._own.setdefault("".join(of), []).append(node)
        self._shared: dict[fx.Node, fx.Node] = {}
        self._results: dict[str, fx.Node] = {}

    def add(self, example: str, weight: str) -> None:
        """Copy what an example needs, for another weight; "" is what belongs to none."""
        mapping = dict(self._shared)
        for node, slot in zip(self._few.placeholders, self._few.inputs, strict=True):
            if slot.weight in ("", example):
                key = replace(slot, weight=weight).key if slot.weight else slot.key
                mapping[node] = self._inputs[key]
                self._inputs[key].meta.setdefault("val", node.meta.get("val"))
        for node in self._own.get(example, ()):
            mapping[node] = self._made.node_copy(node, mapping.__getitem__)
        if not example:
            self._shared = mapping
        for slot, node in zip(self._few.outputs, self._few.returned, strict=True):
            if slot.weight == example:
                self._results[replace(slot, weight=weight).key] = mapping[node]

    def graph(self) -> Graph:
        self._made.output(tuple(self._results[slot.key] for slot in self._whole.outputs))
        module = graph_module(self._few.module, self._made)
        return Graph(self._few.name, module, self._whole.inputs, self._whole.outputs)


def _weights(graph: Graph) -> dict[fx.Node, frozenset[str]]:
    slots = dict(zip(graph.placeholders, graph.inputs, strict=True))
    weights: dict[fx.Node, frozenset[str]] = {}
    for node in graph.module.graph.nodes:
        if node in slots:
            weights[node] = frozenset({slots[node].weight} - {""})
        elif node.op != "output":
            weights[node] = frozenset().union(*(weights[each] for each in node.all_input_nodes))
    return weights
