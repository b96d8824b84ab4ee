"""Write the Python function that the interpreter runs: one call of a kernel for each node.

Torch's own code of a graph looks up each operator by its name at every call, which takes 0.9 of
3.2 us for operators on small tensors, and writing that code takes three times as long. Values are
dropped after they are read for the last time.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from .._ir.operators import Operator

_LITERALS = frozenset({int, bool, str, type(None)})


def function_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function with the arguments and results of a graph."""
    code = _Code(module)
    scope = code.scope
    exec(code.text(), scope)
    return scope["forward"]  # type: ignore[no-any-return]


class _Code:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self.scope: dict[str, Any] = {}  # functions and constants by name
        self._values = {node: f"v{at}" for at, node in enumerate(module.graph.nodes)}
        self._functions: dict[Any, str] = {}

    def text(self) -> str:
        lines: list[str] = []
        inputs = [self._values[node] for node in self._module.graph.find_nodes(op="placeholder")]
        dropped = _dropped(self._module.graph)
        for node in self._module.graph.nodes:
            if node.op == "output":
                lines.append(f"return {self._argument(node.args[0])}")
            elif node.op != "placeholder":
                lines.append(f"{self._values[node]} = {self._value(node)}")
                if node in dropped:
                    lines.append(f"del {', '.join(map(self._values.__getitem__, dropped[node]))}")
        return "\n ".join((f"def forward({', '.join(inputs)}):", *lines))

    def _value(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            parts = str(node.target).split(".")
            return self._constant(functools.reduce(getattr, parts, self._module))
        assert node.op == "call_function", node.op
        arguments = [*map(self._argument, node.args)]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        function = self._functions.get(node.target) or self._new_function(node.target)
        return f"{function}({', '.join(arguments)})"

    def _new_function(self, target: Any) -> str:
        name = self._functions[target] = f"f{len(self._functions)}"
        self.scope[name] = target._op if isinstance(target, Operator) else target
        return name

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._values[value]
        kind = type(value)
        if kind in _LITERALS or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._argument, value))},)" if value else "()"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self._argument(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._argument, bounds))})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name


def _dropped(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return by node the values that are not read after it."""
    dropped: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        last = [] if node.users else [node]
        for each in node.all_input_nodes:
            if each not in seen:
                seen.add(each)
                last.append(each)
        if last and node.op not in ("output", "placeholder"):
            dropped[node] = last
    return dropped
