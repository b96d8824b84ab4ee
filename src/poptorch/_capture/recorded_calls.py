"""Record a function that only calls operators, without torch's tracer.

Torch's tracer serves any code: it keeps a proxy for each tensor, and asks several modes about each
operator. The updates of weights only call operators. Creating a node for each of these calls takes
half of the time. If a function does anything else, such as differentiating, nothing is recorded,
and the caller uses torch's tracer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from .._base.nested_values import with_tensors
from .._ir.graph import graph_module
from .._ir.known_results import BY_VALUE, RepeatedCalls
from .._ir.operators import Operator, call_draws
from .._ir.tensors import Tensors
from .._ops.dispatch import answering

_UNLIKE = {*BY_VALUE, torch.Tag.inplace_view}


def recorded_calls(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    inputs: Tensors,
    mode: Any,
    decomposed: Collection[Any],
) -> fx.GraphModule | None:
    """Return the graph that torch's tracer would record, or None if its help is needed.

    Args:
        function: the function. It may be called again afterwards.
        inputs: its inputs, without values.
        mode: the mode of the inputs.
        decomposed: operators that the tracer replaces by others.
    """
    calls = _RecordedCalls(decomposed, RepeatedCalls(mode))
    for at, each in enumerate(inputs):
        calls.note(each, calls.graph.placeholder(f"tensors_{at}"))
    try:
        with mode, torch.no_grad(), answering(calls.answer):
            results = function(list(inputs))
    except Exception:
        if calls.are_all:
            raise
        return None  # the tracer raises it if it has nothing to do with the recording
    nodes = [calls.node_of(each) for each in results]
    if not calls.are_all:
        return None
    calls.graph.output(tuple(nodes))
    with mode, torch.no_grad():
        for node in calls.graph.nodes:
            if node.op != "output":
                node.meta["val"] = with_tensors(_without_gradient, node.meta["val"])
    return graph_module({}, calls.graph)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


class _RecordedCalls:
    def __init__(self, decomposed: Collection[Any], call: RepeatedCalls) -> None:
        self.graph = fx.Graph()
        self._call = call
        self.are_all = True  # whether all calls so far were recorded
        self._decomposed = decomposed
        self._whole = set[Any]()  # operators that consist of no others
        self._nodes: dict[int, fx.Node] = {}  # by tensor; the nodes keep the tensors alive

    def note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node

    def node_of(self, value: Any) -> Any:
        """Return an argument with nodes in place of tensors."""
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            self.are_all &= node is not None
            return node
        if type(value) in (list, tuple):
            return type(value)(map(self.node_of, value))
        return value

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.are_all = self.are_all and self._is_plain(func, args, kwargs)
        if not self.are_all:
            return func(*args, **kwargs)
        result = self._call(func, args, kwargs)
        nodes = {name: self.node_of(value) for name, value in kwargs.items()}
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, self.node_of(args), nodes, name)
        if isinstance(result, torch.Tensor):
            self.note(result, node)
        elif type(result) in (list, tuple):
            node.meta["val"] = result
            for at, each in enumerate(result):
                part = self.graph.create_node("call_function", operator.getitem, (node, at))
                self.note(each, part)
        else:
            self.are_all = False
        return result

    def _is_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not isinstance(func, Operator) or torch.is_grad_enabled():
            return False
        if func not in self._whole:
            unlike = func in self._decomposed or not _UNLIKE.isdisjoint(func.tags)
            if unlike or func.decompose(*args, **kwargs) is not NotImplemented:
                return False
            self._whole.add(func)
        return not call_draws(func, args, kwargs)
