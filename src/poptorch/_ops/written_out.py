"""Write out the optimizer steps in a graph in operators of torch, according to their formulas."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from .._base import private
from .._base.thread_safety import one_at_a_time
from .._base.user_modes import without_user_modes
from .._ir.graph import Graph, copy_node, lazily
from .optimizer_formulas import BY_OPERATOR


def written_out(graph: Graph) -> Graph:
    """Return a graph in which operators of torch replace the optimizer steps."""
    if not any(node.target in BY_OPERATOR for node in graph.operators):
        return graph
    copied = graph.copy()
    write_out(copied.module.graph)
    copied.module.recompile()
    return copied


def write_out(graph: fx.Graph) -> None:
    """Replace each optimizer step by operators of torch, in place."""
    for node in list(graph.nodes):
        if node.target in BY_OPERATOR:
            results = insert(node, BY_OPERATOR[node.target].written_out, *node.args)
            for result in list(node.users):
                assert result.target is operator.getitem, "steps return several tensors"
                result.replace_all_uses_with(results[result.args[1]])
                graph.erase_node(result)
            erase(node, lambda operand: operand.op == "call_function")


def erase(node: fx.Node, goes: Callable[[fx.Node], bool]) -> None:
    """Erase a node, and those of its operands that nothing else reads and for which
    ``goes`` is true.
    """
    unread = [node]
    while unread:
        node = unread.pop()
        operands = dict.fromkeys(node.all_input_nodes)
        node.graph.erase_node(node)
        unread += [operand for operand in operands if not operand.users and goes(operand)]


def insert(before: fx.Node, function: Callable[..., Any], *args: Any) -> list[fx.Node]:
    """Insert before a node what a function computes from nodes of its graph. Return the results.

    The function returns a tensor or a list of tensors.
    """
    given: list[fx.Node] = []

    def number(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        given.append(argument)
        value = argument.meta["val"]
        return _ContiguousTensor(len(given) - 1, tuple(value.shape), value.dtype)

    aggregate: Any = fx.node.map_aggregate
    form = aggregate(args, number)
    operators = _operators(_DecomposedCall(function, repr(form), form))
    copies = dict(zip(operators.inputs, given, strict=True))
    meta = {key: value for key, value in before.meta.items() if key != "val"}
    with before.graph.inserting_before(before):
        for node, value in operators.values.items():
            copies[node] = copy_node(before.graph, node, copies)
            copies[node].meta = {**meta, "val": value}
    return [copies[result] for result in operators.results]


@dataclass(frozen=True)
class _ContiguousTensor:
    """A contiguous tensor, as those of a state are."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _DecomposedCall:
    function: Callable[..., Any]
    text: str  # the arguments, as text
    args: Any = field(compare=False)


@dataclass(frozen=True)
class _Operators:
    """What a call is written out as: the nodes of a graph, and the value of each operator."""

    inputs: list[fx.Node]
    values: dict[fx.Node, torch.Tensor]
    results: list[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> _Operators:
        values = {node: node.meta["val"] for node in graph.nodes if node.op == "call_function"}
        results: Any = graph.output_node().args[0]
        return cls(list(graph.find_nodes(op="placeholder")), values, results)


_SMALL = (2, 3, 5, 7)


@lru_cache(1024)
def _operators(call: _DecomposedCall) -> _Operators:
    """Return the operators of a call.

    For element-wise formulas, and formulas that reduce a tensor to a number, they are the same for
    tensors of any shape. Therefore one small shape is traced for all shapes with the same number of
    dimensions, which saves most of the time for a model whose weights have many shapes.
    """
    shape = _shape(call)
    if shape is not None and 0 not in shape and len(shape) <= len(_SMALL):
        small = tuple(1 if n == 1 else other for n, other in zip(shape, _SMALL, strict=False))
        operators = _resized(_Operators.of(_traced(_with_shape(call, small))), small, shape)
        if operators is not None:
            return operators
    return _Operators.of(_traced(call))


def _shape(call: _DecomposedCall) -> tuple[int, ...] | None:
    """Return the common shape of all tensors of a call that are not numbers."""
    shapes: set[tuple[int, ...]] = set()
    fx.node.map_aggregate(
        call.args,
        lambda each: shapes.add(each.shape) if isinstance(each, _ContiguousTensor) else None,
    )
    shapes.discard(())
    return shapes.pop() if len(shapes) == 1 else None


def _with_shape(call: _DecomposedCall, shape: tuple[int, ...]) -> _DecomposedCall:
    def changed(each: Any) -> Any:
        return (
            replace(each, shape=shape)
            if isinstance(each, _ContiguousTensor) and each.shape
            else each
        )

    args = fx.node.map_aggregate(call.args, changed)
    return _DecomposedCall(call.function, repr(args), args)


def _resized(
    operators: _Operators, small: tuple[int, ...], shape: tuple[int, ...]
) -> _Operators | None:
    """Return the operators with values of another shape; None if they depend on the shape."""
    values = {}
    for node, value in operators.values.items():
        sizes = any(isinstance(each, list | tuple) for each in (*node.args, *node.kwargs.values()))
        if sizes or not isinstance(value, torch.Tensor) or value.shape not in ((), small):
            return None
        with one_at_a_time(), without_user_modes():
            values[node] = value.new_empty(shape) if value.shape else value
    return replace(operators, values=values)


@lru_cache(256)
def _traced(call: _DecomposedCall) -> fx.Graph:
    inputs: list[torch.Tensor] = []

    def fake(argument: Any) -> Any:
        if not isinstance(argument, _ContiguousTensor):
            return argument
        inputs.append(torch.empty(argument.shape, dtype=argument.dtype))
        return inputs[-1]

    def function(tensors: list[torch.Tensor]) -> Any:
        return call.function(
            *aggregate(
                call.args, lambda a: tensors[a.number] if isinstance(a, _ContiguousTensor) else a
            )
        )

    aggregate: Any = fx.node.map_aggregate
    with one_at_a_time(), lazily(), without_user_modes(), private.FakeTensorMode():
        aggregate(call.args, fake)
        module: fx.GraphModule = private.traced(function, [inputs])
    module.graph.eliminate_dead_code()
    return module.graph
