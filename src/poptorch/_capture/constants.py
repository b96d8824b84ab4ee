"""Values that are known while a graph is being recorded: those that depend on no input."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .._ir.operators import Operator, draws, storage_root, writes, written_by
from .recorders import recorded, recorders
from .trace import untraced, without_data

_records: weakref.WeakKeyDictionary[fx.Graph, _Constants] = weakref.WeakKeyDictionary()


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor that depends on constants only, or None."""
    place = recorded(tensor)
    if place is None:
        return None if without_data(tensor) else tensor
    node, root = place
    if node.graph not in _records:
        _records[node.graph] = _Constants(root)
    return _records[node.graph].value(node)


def value_of_inputs(
    tensor: torch.Tensor, inputs: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, set[int]] | None:
    """Return the value of a tensor that depends on some inputs of the record only."""
    place = recorded(tensor)
    if place is None or len(recorders()) > 1:  # the body of a loop has inputs of its own
        return None
    node, root = place
    nodes = list(node.graph.nodes)
    placeholders = [other for other in nodes if other.op == "placeholder"]
    given = {placeholders[index]: value for index, value in inputs.items()}
    needed = _leading_to([node])
    changed = {storage_root(written) for other in nodes for written in written_by(other)}
    if not changed.isdisjoint(map(storage_root, needed)):
        return None
    values: dict[fx.Node, Any] = {}
    with untraced(), torch.no_grad():
        for other in nodes:
            if other in needed:
                value = _computed(other, values, given, root)
                if value is None:
                    return None
                values[other] = value
    index_of = {placeholder: index for index, placeholder in enumerate(placeholders)}
    return values[node], {index_of[used] for used in needed & given.keys()}


class _Constants:
    """Runs the constant part of a graph, as far as it is recorded."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._values: dict[fx.Node, Any] = {}
        self._last: fx.Node | None = None

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a node as it is now, or None if it depends on inputs."""
        graph = node.graph
        pending = list(graph.nodes)
        if self._last is not None:
            pending = pending[pending.index(self._last) + 1 :]
        with untraced(), torch.no_grad():
            for new in pending:
                self._run(new)
        self._last = pending[-1] if pending else self._last
        result = self._values.get(node)
        return result if isinstance(result, torch.Tensor) else None

    def _run(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            value = getattr(self._root, str(node.target))
            if isinstance(value, torch.Tensor) and not without_data(value):
                self._values[node] = value.detach().clone()
        elif node.op == "call_function":
            target: Any = node.target
            known = all(source in self._values for source in node.all_input_nodes)
            pure = isinstance(target, Operator) or target is operator.getitem
            if known and pure and not draws(node):
                args: Any = fx.map_arg(node.args, self._values.__getitem__)
                kwargs: Any = fx.map_arg(node.kwargs, self._values.__getitem__)
                self._values[node] = target(*args, **kwargs)
            elif writes(node):
                self._forget(node)

    def _forget(self, node: fx.Node) -> None:
        """An input was written into constants: they, and their views, are constants no more."""
        written = {
            _storage(self._values[source])
            for source in node.all_input_nodes
            if isinstance(self._values.get(source), torch.Tensor)
        }
        self._values = {
            other: value
            for other, value in self._values.items()
            if not isinstance(value, torch.Tensor) or _storage(value) not in written
        }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _leading_to(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return nodes, and all that they are computed from."""
    needed: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


def _computed(
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    given: Mapping[fx.Node, torch.Tensor],
    root: torch.nn.Module,
) -> Any:
    """Return the value of one node, or None if it is not known."""
    if node.op == "placeholder":
        return given.get(node)
    if node.op == "get_attr":
        value = getattr(root, str(node.target))
        return value if isinstance(value, torch.Tensor) and not without_data(value) else None
    target: Any = node.target
    if not (isinstance(target, Operator) or target is operator.getitem) or draws(node):
        return None
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
    return target(*args, **kwargs)
