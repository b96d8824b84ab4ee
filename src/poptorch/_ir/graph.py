"""Define ``Graph``: a pure ATen graph with named inputs and outputs. Passes copy it and
never edit it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from .._base import private
from .operators import draws
from .slots import Kind, Slot
from .tensors import TensorsByKey

# A node's own way of setting an attribute enters it in the graph's table of targets once more.
_set = object.__setattr__

# keys in a node's meta: the part that it belongs to, and the weight whose gradient it is
PART, GRADIENT = "part", "gradient"


@dataclass(frozen=True)
class SlotFunction:
    name: str
    function: Callable[[TensorsByKey], TensorsByKey]  # by slot key
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]  # one that is also an input is an update of state
    # initial values of new state, by key; 0 if missing
    initial: Mapping[str, complex] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graph:
    name: str
    module: fx.GraphModule  # returns a tuple
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        return tuple(output.args[0])

    @property
    def operators(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @property
    def arguments(self) -> dict[fx.Node, Slot]:
        return dict(zip(self.placeholders, self.inputs, strict=True))

    @property
    def results(self) -> list[tuple[Slot, fx.Node]]:
        return list(zip(self.outputs, self.returned, strict=True))

    @property
    def gradients(self) -> list[Slot]:
        return [slot for slot in self.outputs if slot.kind is Kind.GRADIENT]

    @property
    def trained(self) -> list[Slot]:
        """The weights for which it has gradients."""
        paths = {slot.path for slot in self.gradients}
        return [slot for slot in self.inputs if slot.kind is Kind.PARAM and slot.path in paths]

    @functools.cached_property  # several checks ask for it
    def random(self) -> bool:
        parts = (part for part in self.module.modules() if isinstance(part, fx.GraphModule))
        return any(draws(node) for part in parts for node in part.graph.nodes)

    @property
    def generators(self) -> dict[fx.Node, torch.Generator]:
        """The user's generators from which it draws, each with the node that reads it."""
        parts = (part for part in self.module.modules() if isinstance(part, fx.GraphModule))
        read = (
            (node, getattr(part, str(node.target)))
            for part in parts
            for node in part.graph.find_nodes(op="get_attr")
        )
        return {node: value for node, value in read if isinstance(value, torch.Generator)}

    @property
    def updates(self) -> frozenset[str]:
        read = {slot.key for slot in self.inputs if slot.is_state}
        return frozenset(slot.key for slot in self.outputs if slot.key in read)

    def insert(
        self, graph: fx.Graph, values: Mapping[str, fx.Node], attributes: dict[str, object]
    ) -> dict[str, fx.Node]:
        """Copy the operators into another graph. See ``Part``."""
        copies: dict[fx.Node, fx.Node] = {}
        for node, slot in self.arguments.items():
            copies[node] = values[slot.key]
            copies[node].meta.setdefault("val", node.meta.get("val"))
        for node in self.module.graph.nodes:
            if node.op == "get_attr":  # a sub-graph of control flow
                target = f"{self.name}_{node.target}"
                attributes[target] = getattr(self.module, node.target)
                copies[node] = graph.create_node("get_attr", target)
            elif node.op not in ("placeholder", "output"):
                copies[node] = copy_node(graph, node, copies)
                copies[node].meta.setdefault(PART, self.name)
        return {slot.key: copies[node] for slot, node in self.results}

    def copy(self) -> Graph:
        return Graph(self.name, copied(self.module), self.inputs, self.outputs)

    def examples(self) -> list[torch.Tensor]:
        """Return example inputs without meaningful values, which use no memory."""
        return [torch.empty(slot.shape, dtype=slot.dtype) for slot in self.inputs]

    def __call__(self, values: TensorsByKey) -> dict[str, torch.Tensor]:
        results = self.module(*(values[slot.key] for slot in self.inputs))
        return {slot.key: value for slot, value in zip(self.outputs, results, strict=True)}

    def __str__(self) -> str:
        names = {node: slot.key for node, slot in self.arguments.items()}
        lines = [f"graph {self.name}", *(f"  in  {slot}" for slot in self.inputs)]
        for node in self.operators:
            args = (names.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
            function = getattr(node.target, "__name__", node.target)
            lines.append(f"  {node.name} = {function}({', '.join(map(str, args))})")
        lines += [f"  out {slot} = {names.get(node, node.name)}" for slot, node in self.results]
        return "\n".join(lines)


def slots_of(graphs: Iterable[Graph]) -> dict[str, Slot]:
    """Return the slots of all inputs and outputs of graphs, by key."""
    return {slot.key: slot for graph in graphs for slot in (*graph.inputs, *graph.outputs)}


def copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = copy_node(graph, node, copies)
    return graph_module(module, graph)


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node whose arguments were already copied.

    Torch's method searches all arguments again for symbolic sizes, which takes half of the time.
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    _set(copy, "args", fx.map_arg(node.args, copies.__getitem__))
    if node.kwargs:
        _set(copy, "kwargs", fx.map_arg(node.kwargs, copies.__getitem__))
    copy.meta.update(node.meta)
    return copy


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give a node other arguments, without entering it in the graph's table of targets again."""
    _set(node, "args", args)
    _set(node, "kwargs", kwargs)


class Part(Protocol):
    """A part of a composed graph."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[Slot, ...]: ...
    @property
    def outputs(self) -> tuple[Slot, ...]: ...

    def insert(
        self, graph: fx.Graph, values: Mapping[str, fx.Node], attributes: dict[str, object]
    ) -> dict[str, fx.Node]:
        """Create the operators of the part in a graph, and return its outputs by key.

        Args:
            graph: the graph.
            values: the nodes there of the inputs, by key.
            attributes: gets the sub-graphs and generators to which the operators refer, by name.
        """


def compose(
    name: str, parts: Sequence[Part], keep: Iterable[Kind] = (), drop: Collection[str] = ()
) -> Graph:
    """Join graphs into one. What one part writes, later parts read.

    Gradients are passed on and removed, unless ``keep`` contains their kind. Outputs in ``drop``
    are also removed, by key. If several parts write another output, the last one stays.
    """
    graph = fx.Graph()
    attributes: dict[str, object] = {}
    inputs = {slot.key: slot for slot in _free_inputs(parts)}
    values = {key: placeholder(graph, key) for key in inputs}
    outputs: dict[str, Slot] = {}
    for part in parts:
        results = part.insert(graph, values, attributes)
        values |= results
        for slot in part.outputs:
            if slot.kind is Kind.GRADIENT:
                meta = results[slot.key].meta
                meta[GRADIENT] = tuple(dict.fromkeys((*meta.get(GRADIENT, ()), slot.path)))
            outputs[slot.key] = slot
    handed_over = {Kind.GRADIENT} - set(keep)
    result = [
        slot for slot in outputs.values() if slot.kind not in handed_over and slot.key not in drop
    ]
    graph.output(tuple(values[slot.key] for slot in result))
    remove_dead_nodes(graph)
    graph.lint()
    module = graph_module(attributes, graph)
    return Graph(name, module, tuple(inputs.values()), tuple(result))


def remove_dead_nodes(
    graph: fx.Graph, is_impure: Callable[[fx.Node], bool] = fx.Node.is_impure
) -> None:
    """Remove nodes that nothing uses, except for impure ones. The graph must be in order.

    Torch's method also checks the graph, and asks about each node whether it is impure, which takes
    most of the time.
    """
    if graph.find_nodes(op="get_attr"):  # perhaps of a body, whose dead nodes are removed as well
        graph.eliminate_dead_code(is_impure)
        return
    for node in reversed(graph.nodes):
        if not node.users and not is_impure(node):
            graph.erase_node(node)


def _free_inputs(parts: Sequence[Part]) -> list[Slot]:
    written: set[str] = set()
    free: dict[str, Slot] = {}
    for part in parts:
        for slot in part.inputs:
            if slot.key not in written:
                free.setdefault(slot.key, slot)
        written.update(slot.key for slot in part.outputs)
    return list(free.values())


def placeholder(graph: fx.Graph, key: str) -> fx.Node:
    node = graph.placeholder(key)
    _set(node, "target", node.name)
    return node


def lazily() -> contextlib.AbstractContextManager[None]:
    lazy = private.optional("use_lazy_graph_module")
    return contextlib.nullcontext() if lazy is None else lazy(True)


def graph_module(attributes: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    chosen = private.optional("get_graph_module_cls")
    with lazily():
        kind: Any = fx.GraphModule if chosen is None else chosen()
    module: fx.GraphModule = kind(attributes, graph)
    return module
