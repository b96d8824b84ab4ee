"""Values that are known while a graph is being recorded: those that depend on no input.

Torch records ``torch.arange(3)`` in ``forward`` like anything else. Where Python asks for such a
value it is computed on the side, by running the part of the record that leads to it.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import fx

from .._ir.operators import Operator, draws, writes
from .recorders import recorded
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
