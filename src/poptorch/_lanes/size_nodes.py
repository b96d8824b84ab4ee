"""Create nodes for symbolic sizes while a graph of several micro-batches is recorded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from .._base import private

aten = torch.ops.aten
SIZES = (torch.SymInt, torch.SymFloat)


class SizeNodes:
    """Finds or makes a node for each size. Sizes are equal if their expressions are."""

    def __init__(self) -> None:
        self._given: dict[Any, tuple[fx.Node, int]] = {}  # by symbol, an input and its dimension
        self._made: dict[Any, fx.Node] = {}  # by kind and expression

    def read(self, value: torch.Tensor, node: fx.Node) -> None:
        """Note that an input has the sizes of this value."""
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._given.setdefault(size.node.expr, (node, dim))

    def register(self, size: Any, node: fx.Node) -> None:
        """Note that a node computes this size."""
        self._made.setdefault((type(size), size.node.expr), node)

    def node(self, size: Any) -> Any:
        """Return the node that computes a size, or a number."""
        expression = size.node.expr
        if expression.is_number:
            return float(expression) if isinstance(size, torch.SymFloat) else int(expression)
        key = type(size), expression
        if key not in self._made:
            symbols = {each: fx.Proxy(self._reader(each)) for each in expression.free_symbols}
            self._made[key] = private.sympy_interp(_analysis(), symbols, expression).node
        return self._made[key]

    def _reader(self, symbol: Any) -> fx.Node:
        key = torch.SymInt, symbol
        if key not in self._made:
            node, dim = self._given[symbol]
            self._made[key] = node.graph.call_function(aten.sym_size.int, (node, dim))
        return self._made[key]


@functools.cache
def _analysis() -> Any:
    class Recording(private.PythonReferenceAnalysis):  # type: ignore[misc]
        """Torch's translation of expressions to Python, for values that record nodes."""

        @staticmethod
        def to_dtype(value: Any, dtype: torch.dtype) -> Any:
            """Call a function, because torch would record the call of a method."""
            if not isinstance(value, fx.Proxy):
                return float(value)
            return fx.Proxy(value.node.graph.call_function(torch.sym_float, (value.node,)))

    return Recording
