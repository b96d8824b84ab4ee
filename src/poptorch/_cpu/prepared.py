"""Compute values of compiled inference that depend only on weights when these change, not in each
call.

A batch norm with given statistics is a factor and an offset for each channel, and both are folded
into the weights of the preceding product. Products and convolutions get weights in oneDNN's own
layouts.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir import slots, verify
from .._ir.graph import Graph, copy_node, graph_module, placeholder
from .._ir.operators import Operator, acts, draws, may_view, reachable, writes
from .._ir.program import Program, State
from .._ir.slots import MODEL_STATE, Slot
from ..backends.driver import LoopExecutable
from .folding import fold
from .packing import is_packing, pack

aten = torch.ops.aten
_TURNS = (aten.t.default, aten.permute.default)


def prepared(program: Program, callable_from_cpp: Callable[[fx.GraphModule], bool]) -> Program:
    """Return an inference program with a graph that runs when weights change, if this
    saves time.
    """
    if [*program.graphs] != ["forward"]:
        return program
    forward = program.graphs["forward"].copy()
    graph = forward.module.graph
    fold(graph, _fixed(forward))
    if private.has(private.PACKED) and callable_from_cpp(forward.module):
        pack(graph, _fixed(forward))
    hoisted = _hoisted(forward, _fixed(forward))
    if not hoisted:
        return program
    prepare = _prepare(forward, hoisted)
    graphs = {"forward": _rest(forward, prepare, hoisted)}
    made = dataclasses.replace(program, graphs=graphs, prepare=prepare)
    verify.verify_program(made)
    return made


def _fixed(graph: Graph) -> set[fx.Node]:
    """Return the values that depend only on weights and constants."""
    arguments, updates = graph.arguments, graph.updates
    fixed = {
        node
        for node, slot in arguments.items()
        if slot.kind in MODEL_STATE and slot.key not in updates and slot.replicas == 1
    }
    for node in graph.operators:
        if fixed.issuperset(node.all_input_nodes) and _is_plain(node):
            fixed.add(node)
    return fixed


def _is_plain(node: fx.Node) -> bool:
    """Return whether an operator always gives the same result. Operators of other libraries may do
    anything.
    """
    if not isinstance(node.target, Operator):
        return node.target is operator.getitem
    of_torch = node.target.namespace in ("aten", "prims", "mkldnn")
    return of_torch and not draws(node) and not writes(node)


def _hoisted(graph: Graph, fixed: set[fx.Node]) -> list[fx.Node]:
    """Return the computed values that the rest reads, if they take no more bytes than the
    weights.
    """
    weights = {node for node in graph.placeholders if node in fixed}
    computed = {
        node
        for node in fixed - weights
        if any(isinstance(n.target, Operator) and not may_view(n) for n in _below(node, weights))
        and weights & reachable([node], _inputs)
    }
    ends = {_stored(node) for node in computed if any(user not in fixed for user in node.users)}
    chosen, left = set[fx.Node](), sum(map(_bytes, weights))
    tensors = [
        node
        for node in graph.operators
        if node in ends and node in computed and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    for end in sorted(tensors, key=_bytes):  # equal ones in the order of the graph
        left -= 0 if is_packing(end) else _bytes(end)
        if left >= 0 or is_packing(end):
            chosen.add(end)
    return [node for node in graph.operators if node in chosen]


def _inputs(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _below(node: fx.Node, weights: set[fx.Node]) -> set[fx.Node]:
    return reachable([node], _inputs) - weights


def _stored(node: fx.Node) -> fx.Node:
    """Return the value that a view repeats or reorders, if storing that needs less memory."""
    source, value = node.args[0] if may_view(node) else None, node.meta.get("val")
    given = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(given, torch.Tensor) or not isinstance(value, torch.Tensor):
        return node
    turned = given.is_contiguous() and not value.is_contiguous()
    smaller = given.numel() < value.numel() + turned
    return _stored(source) if smaller else node  # type: ignore[arg-type]


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def _slot(node: fx.Node) -> Slot:
    value = node.meta["val"]
    return slots.value(node.name, tuple(value.shape), value.dtype)


def _prepare(graph: Graph, hoisted: list[fx.Node]) -> Graph:
    needed = reachable(hoisted, _inputs)
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.module.graph.nodes:
        if node in needed:
            copies[node] = copy_node(made, node, copies)
    made.output(tuple(copies[node] for node in hoisted))
    inputs = tuple(slot for node, slot in graph.arguments.items() if node in needed)
    module = graph_module(graph.module, made)
    return Graph("prepare", module, inputs, tuple(map(_slot, hoisted)))


def _rest(graph: Graph, prepare: Graph, hoisted: list[fx.Node]) -> Graph:
    """Return the graph with prepared values as inputs, and without weights that it does not use."""
    own, places, written = graph.module.graph, graph.arguments, graph.updates
    first = next(node for node in own.nodes if node.op != "placeholder")
    for node, slot in zip(hoisted, prepare.outputs, strict=True):
        with own.inserting_before(first):
            given = placeholder(own, f"prepared_{slot.name}")
        given.meta["val"] = node.meta["val"].contiguous()
        node.replace_all_uses_with(given)
        places[given] = slot
    own.eliminate_dead_code(is_impure_node=acts)
    for node in [node for node, slot in places.items() if slot.kind in MODEL_STATE]:
        if not node.users and places[node].key not in written:
            own.erase_node(node)
    inputs = tuple(places[node] for node in own.nodes if node.op == "placeholder")
    return Graph(graph.name, graph_module(graph.module, own), inputs, graph.outputs)


class Preparing(LoopExecutable):
    """Runs a prepared program. The memory of a weight is released if only its copy is used."""

    def _prepared(self, state: State) -> Mapping[str, torch.Tensor]:
        prepare = self._program.prepare
        if prepare is None:
            return {}
        weights = [state.read(slot) for slot in prepare.inputs]
        values = _Preparation(self._program, prepare, state).run(*weights)
        return {
            slot.key: value if value.is_mkldnn else value.contiguous()
            for slot, value in zip(prepare.outputs, values, strict=True)
        }


class _Preparation(fx.Interpreter):
    """Runs ``prepare``. Each weight is released when it was copied, so that there are never two
    copies of all weights.
    """

    def __init__(self, program: Program, prepare: Graph, state: State) -> None:
        super().__init__(prepare.module)
        self._alone, self._state = copied_only(program), state

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._alone:
            slot, views = self._alone[n]
            weight = self._state.read(slot)
            whole = weight.untyped_storage().nbytes() == weight.nbytes
            if whole and (value.is_mkldnn or n.target is aten.clone.default):
                for view in views:
                    weight = view.target(weight, *view.args[1:])  # type: ignore[operator]
                self._state.writes.release(slot.key, weight, value)
        return value


def copied_only(program: Program) -> dict[fx.Node, tuple[Slot, list[fx.Node]]]:
    """Return the copies of weights that nothing else reads, and the views from which they
    are made.
    """
    prepare = program.prepare
    if prepare is None:
        return {}
    read = {slot.key for graph in program.graphs.values() for slot in graph.inputs}
    alone = {}
    for node, slot in prepare.arguments.items():
        passed, own = list[fx.Node](), node
        while len(own.users) == 1 and not _copies(own):
            own = next(iter(own.users))
            passed.append(own)
        views = [each for each in passed[:-1] if each.target is not aten.contiguous.default]
        moved = _copies(own) and all(view.target in _TURNS for view in views)
        if moved and slot.key not in read:
            alone[own] = slot, views
    return alone


def _copies(node: fx.Node) -> bool:
    return is_packing(node) or node.target is aten.clone.default
