"""Describe a program's operators as rows of a page: what they compute, from what, for
which module.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import fx

from .._cost.live_bytes import tensors, value_bytes
from .._cost.operations import flops_of
from .._ir.block_labels import label_of, line_of
from .._ir.graph import PART, Graph
from .._ir.operators import may_view, name_of
from .._ir.program import Node, Program, Repeat, Run
from .._ir.slots import Kind, Slot, type_text
from .operator_code import NOISE, constant
from .simplify import of_update


@dataclass(frozen=True, eq=False)
class PageRow:
    number: int
    code: str  # HTML
    types: str  # types of its results
    bytes: int  # size of its results; 0 for a view
    flops: int  # per call
    graph: str
    direction: str  # forward, backward or update
    module: str
    place: tuple[str, int] | None  # the user's line
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]


def rows_of(program: Program, inputs: Sequence[str]) -> list[PageRow]:
    found: list[PageRow] = []
    runs = runs_of(program.body)
    for graph in program.graphs.values():
        found += _Rows(graph, program, inputs, len(found), runs[graph.name]).rows()
    return found


def runs_of(body: Sequence[Node], times: int = 1) -> Counter[str]:
    """Return how many times a call runs each graph."""
    found = Counter[str]()
    for node in body:
        if isinstance(node, Run):
            found[node.graph] += times
        elif isinstance(node, Repeat):
            found += runs_of(node.body, times * node.count)
    return found


def owner_of(slot: Slot) -> str:
    """Return the path of the module that owns a weight or buffer."""
    return slot.path.rpartition(".")[0]


class _Rows:
    def __init__(
        self, graph: Graph, program: Program, inputs: Sequence[str], before: int, runs: int
    ) -> None:
        self._graph, self._inputs, self._runs = graph, inputs, runs
        self._slots = graph.arguments
        self._nodes = [node for node in graph.operators if node.target is not operator.getitem]
        self._numbers = {node: at for at, node in enumerate(self._nodes, before + 1)}
        self._writes: dict[fx.Node, list[Slot]] = defaultdict(list)
        # weights for which a value is computed
        self._weights: dict[fx.Node, set[str]] = defaultdict(set)
        for slot, node in graph.results:
            self._weights[node] |= {slot.weight} if slot.is_state and slot.weight else set()
            while node.target is operator.getitem:
                node = node.all_input_nodes[0]
            self._writes[node].append(slot)
        for node in reversed(graph.operators):
            for each in node.all_input_nodes:
                self._weights[each] |= self._weights[node]
        visible = (slot for slot in program.visible_slots().values() if slot.kind is Kind.PARAM)
        self._owners = {slot.weight: owner_of(slot) for slot in visible}
        self._parts = dict(self._parts_of(program))  # weights, as views of their bundles

    def _parts_of(self, program: Program) -> Iterator[tuple[fx.Node, Slot]]:
        whole = {bundle.slot.key: bundle.members for bundle in program.bundles}
        for node in self._nodes:
            if node.meta.get(PART) == "spread" and node.args[0] in self._slots:
                offset = node.args[3] if len(node.args) > 3 else 0
                members = whole[self._slots[node.args[0]].key]  # type: ignore[index]
                yield node, next(each.slot for each in members if each.offset == offset)

    def rows(self) -> Iterator[PageRow]:
        for node, number in self._numbers.items():
            given = [self._text(each) for each in node.args]
            named = ((name, each) for name, each in node.kwargs.items() if name not in NOISE)
            given += [f"{name}={self._text(each)}" for name, each in named]
            called = escape(name_of(node).removeprefix("aten."))
            types = [type_text(each.dtype, tuple(each.shape)) for each in tensors(node)]
            yield PageRow(
                number, f"{escape(node.name)} = {called}({', '.join(given)})", ", ".join(types),
                0 if may_view(node) else value_bytes(node), flops_of(node) * self._runs,
                self._graph.name, self._direction(node), self._module(node), line_of(node),
                tuple(filter(None, map(self._read, node.all_input_nodes))),
                tuple(self._writes[node]),
            )  # fmt: skip

    def _text(self, value: Any) -> str:
        """Return an operand as HTML, with a link to the operator that computes it."""
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        if not isinstance(value, fx.Node):
            return escape(constant(value))
        if value in self._slots:
            slot = self._slots[value]
            return escape(self._inputs[slot.index] if slot.kind is Kind.BATCH else slot.key)
        if value.target is operator.getitem:
            return f"{self._text(value.args[0])}[{value.args[1]}]"
        if value not in self._numbers:  # it is the body of a loop
            return escape(value.name)
        return f'<a href="#o{self._numbers[value]}">{escape(value.name)}</a>'

    def _direction(self, node: fx.Node) -> str:
        if self._graph.name in ("update", "squares"):
            return "update"
        if of_update(node):  # the sum of gradients, in a graph that is not a whole step
            return "update" if self._graph.name == "step" else "backward"
        backward = label_of(node).backward or node.meta.get(PART) == "gather"
        return "backward" if backward else "forward"

    def _module(self, node: fx.Node) -> str:
        """Return the path of the module that made the operator, or that owns the only weight it is
        for.
        """
        if node.meta.get(PART, "micro") == "micro":
            return label_of(node).module
        weights = {self._parts[node].weight} if node in self._parts else self._weights[node]
        return self._owners.get(next(iter(weights)), "") if len(weights) == 1 else ""

    def _read(self, node: fx.Node) -> Slot | None:
        """Return the graph input that a value is, or is a view of."""
        while node not in self._slots and node not in self._parts:
            if not (may_view(node) and isinstance(node.args[0], fx.Node)):
                return None
            node = node.args[0]
        return self._slots.get(node) or self._parts[node]
