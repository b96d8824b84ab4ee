"""Graph: a pure ATen graph whose every input and output says what it is.

Graphs are copied between rooms, never edited in place. Two graphs join where an output slot of
one is an input slot of the next, so composition needs no positions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .modules import graph_module
from .operators import draws
from .slot import Kind, Slot


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced function between named tensors.

    Attributes:
        name: what the printed program calls it, for instance ``micro`` or ``update``.
        module: ``module(*inputs)`` returns a tuple, one value per output slot.
        inputs: what each placeholder is, in order.
        outputs: what each returned value is, in order.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, in the order of ``inputs``."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The returned nodes, in the order of ``outputs``."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        return tuple(output.args[0])

    @property
    def random(self) -> bool:
        """Whether running it draws random numbers."""
        parts = (part for part in self.module.modules() if isinstance(part, fx.GraphModule))
        return any(draws(node) for part in parts for node in part.graph.nodes)

    @property
    def updates(self) -> frozenset[str]:
        """Keys of the state that it changes: those that are read and written."""
        read = {slot.key for slot in self.inputs if slot.is_state}
        return frozenset(slot.key for slot in self.outputs if slot.key in read)

    def copy(self) -> Graph:
        """Return a graph that may be edited without touching this one."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, val_map={}))
        return Graph(self.name, graph_module(self.module, graph), self.inputs, self.outputs)

    def zero_inputs(self) -> list[torch.Tensor]:
        """Return zero-filled example tensors of the inputs."""
        return [torch.zeros(slot.shape, dtype=slot.dtype) for slot in self.inputs]

    def __call__(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Evaluate it on tensors by key: slow and simple, for tests."""
        results = self.module(*(values[slot.key] for slot in self.inputs))
        return {slot.key: value for slot, value in zip(self.outputs, results, strict=True)}


def compose(
    name: str, parts: Sequence[Graph], keep: Iterable[Kind] = (), drop: Collection[str] = ()
) -> Graph:
    """Join graphs into one: what one part writes, the next parts read.

    Inputs that no earlier part writes become inputs of the whole. Gradients are handed over and
    disappear unless ``keep`` names their kind, and so do the outputs whose keys ``drop`` names;
    every other output stays, the latest writer winning.
    """
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    inputs: dict[str, Slot] = {}
    outputs: dict[str, Slot] = {}
    attributes: dict[str, object] = {}
    names = Identifiers()
    for slot in _free_inputs(parts):
        node = graph.placeholder(names.new(slot.key))
        inputs[slot.key] = slot
        values[slot.key] = node
    for part in parts:
        mapping = {
            node: values[slot.key]
            for node, slot in zip(part.placeholders, part.inputs, strict=True)
        }
        for node, slot in zip(part.placeholders, part.inputs, strict=True):
            values[slot.key].meta.setdefault("val", node.meta.get("val"))
        for node in part.module.graph.nodes:
            if node.op == "get_attr":  # a sub-graph of control flow
                target = f"{part.name}_{node.target}"
                attributes[target] = getattr(part.module, node.target)
                mapping[node] = graph.create_node("get_attr", target)
            elif node.op not in ("placeholder", "output"):
                mapping[node] = graph.node_copy(node, mapping.__getitem__)
        for node, slot in zip(part.returned, part.outputs, strict=True):
            values[slot.key] = mapping[node]
            outputs[slot.key] = slot
    handed_over = {Kind.GRADIENT} - set(keep)
    result = [
        slot for slot in outputs.values() if slot.kind not in handed_over and slot.key not in drop
    ]
    graph.output(tuple(values[slot.key] for slot in result))
    graph.eliminate_dead_code()
    graph.lint()
    module = graph_module(attributes, graph)
    return Graph(name, module, tuple(inputs.values()), tuple(result))


class Identifiers:
    """Names for Python code: keys that differ in punctuation only get different ones."""

    def __init__(self) -> None:
        self._given = Counter[str]()

    def new(self, key: str) -> str:
        """Return the name of one more key."""
        plain = re.sub(r"\W", "_", key)
        same = self._given[plain]
        self._given[plain] += 1
        return f"{plain}__{same}" if same else plain


def _free_inputs(parts: Sequence[Graph]) -> list[Slot]:
    written: set[str] = set()
    free: dict[str, Slot] = {}
    for part in parts:
        for slot in part.inputs:
            if slot.key not in written:
                free.setdefault(slot.key, slot)
        written.update(slot.key for slot in part.outputs)
    return list(free.values())
