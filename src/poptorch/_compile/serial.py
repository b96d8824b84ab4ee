"""Plans as JSON, for digests and for people; graphs of torch operators back again.

Only compiler processes read, and only what the process that started them wrote: a graph becomes
Python code, so one from elsewhere could run anything.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
import operator
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from .. import _ir, enums
from .._base import source
from .._base.errors import AssertionFailure
from .._capture import trace
from .._ir.graph import Graph, graph_module
from .._ir.operators import Operator
from .._ir.slots import Slot

_TORCH_VALUES = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow")
}
Json = Any


class Unreadable(AssertionFailure):
    """The JSON names something that this library or torch does not have."""


@functools.cache
def _classes() -> dict[str, type]:
    """Every frozen value and enum of the program's language, by name."""
    classes: dict[str, type] = {}
    names = [info.name for info in pkgutil.iter_modules(_ir.__path__)]
    modules = [enums, *(importlib.import_module(f"{_ir.__name__}.{name}") for name in names)]
    for module in modules:
        for name, value in vars(module).items():
            is_class = isinstance(value, type) and value.__module__ == module.__name__
            if is_class and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)):
                classes[name] = value
    return classes


def encode(value: Any, nodes: Mapping[fx.Node, int] = MappingProxyType({})) -> Json:
    """Return a value as JSON.

    Raises:
        TypeError: it holds something that has no JSON form.
    """
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, fx.Node):
        return {"node": nodes[value]}
    if isinstance(value, list):
        return [encode(item, nodes) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, nodes) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k), encode(v, nodes)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode(v, nodes) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, kind in _TORCH_VALUES.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, Graph):
        return _encode_graph(value)
    if dataclasses.is_dataclass(value) and _classes().get(type(value).__name__) is type(value):
        kept = [f.name for f in dataclasses.fields(value) if f.metadata.get("saved", True)]
        fields = {name: encode(getattr(value, name)) for name in kept}
        return {"is": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def decode(data: Json, nodes: list[fx.Node] | None = None) -> Any:
    """Return the value that ``encode`` was given.

    Raises:
        Unreadable: it names an operator or value that does not exist here.
    """
    if isinstance(data, list):
        return [decode(item, nodes) for item in data]
    if not isinstance(data, dict):
        return data
    if "fields" in data:
        return _decode_dataclass(data)
    if "enum" in data:
        kind: Any = _known(data["enum"])
        if not issubclass(kind, enum.Enum) or data["name"] not in kind.__members__:
            raise Unreadable(f"{data['enum']} has no member {data['name']}")
        return kind[data["name"]]
    if "nodes" in data:
        return _decode_graph(data)
    (form,) = data
    content = data[form]
    if form in _TORCH_VALUES:
        value = getattr(torch, content, None)
        if not isinstance(value, _TORCH_VALUES[form]):
            raise Unreadable(f"torch has no {form} {content}")
        return value
    readers: dict[str, Callable[[], Any]] = {
        "node": lambda: (nodes or [])[content],
        "float": lambda: float(content),
        "complex": lambda: complex(*(decode(part) for part in content)),
        "tuple": lambda: tuple(decode(item, nodes) for item in content),
        "set": lambda: frozenset(decode(item) for item in content),
        "dict": lambda: {decode(k): decode(v, nodes) for k, v in content},
        "slice": lambda: slice(*(decode(item, nodes) for item in content)),
        "device": lambda: torch.device(content),
    }
    if form not in readers:
        raise Unreadable(f"Unknown form {form!r}")
    return readers[form]()


def _known(name: str) -> type:
    if name not in _classes():
        raise Unreadable(f"Unknown value {name!r}")
    return _classes()[name]


def _decode_dataclass(data: Json) -> Any:
    kind: Any = _known(data["is"])
    names = {field.name for field in dataclasses.fields(kind)}
    if not data["fields"].keys() <= names:
        raise Unreadable(f"{data['is']} has no {', '.join(sorted(data['fields'].keys() - names))}")
    return kind(**{name: decode(value) for name, value in data["fields"].items()})


def _encode_graph(graph: Graph) -> Json:
    return {
        "nodes": _encode_nodes(graph.module),
        "name": graph.name,
        "inputs": encode(graph.inputs),
        "outputs": encode(graph.outputs),
    }


def _encode_nodes(module: fx.GraphModule) -> list[Json]:
    numbers = {node: at for at, node in enumerate(module.graph.nodes)}
    return [_encode_node(node, module, numbers) for node in module.graph.nodes]


def _encode_node(node: fx.Node, module: fx.GraphModule, numbers: dict[fx.Node, int]) -> Json:
    data: dict[str, Json] = {"op": node.op}
    if node.op == "placeholder":
        return {**data, "name": node.name}
    if node.op == "get_attr":
        inner = getattr(module, str(node.target))
        if not isinstance(inner, fx.GraphModule):
            raise TypeError(f"attribute {node.target} is no graph")
        return {**data, "target": node.target, "module": _encode_nodes(inner)}
    data["args"] = encode(node.args, numbers)
    if node.kwargs:
        data["kwargs"] = encode(dict(node.kwargs), numbers)
    if node.op == "call_function":
        data["target"] = _target_name(node.target)
        line = source.innermost_user_line(node.meta.get("stack_trace"))
        if line is not None:
            data["at"] = f"{line[0]}:{line[1]}"
    return data


def _target_name(target: Any) -> str:
    if isinstance(target, Operator):
        return str(target)
    for name, function in _FUNCTIONS.items():
        if function is target:
            return name
    if getattr(target, "namespace", None) == "higher_order":
        return f"higher_order.{target.name()}"
    raise TypeError(f"{target} has no JSON form")


def _target(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    target: Any = torch.ops
    try:
        for part in name.split("."):
            target = getattr(target, part)
    except AttributeError:
        target = None
    is_higher = name.startswith("higher_order.") and callable(target)
    if not isinstance(target, Operator) and not is_higher:
        raise Unreadable(
            f"The operator {name} is not registered",
            fix="import the module that defines it before loading",
        )
    return target  # type: ignore[no-any-return]


def _decode_graph(data: Json) -> Graph:
    module = _decode_nodes(data["nodes"])
    inputs: tuple[Slot, ...] = decode(data["inputs"])
    trace.fill_in_values(module, [(slot.shape, slot.dtype) for slot in inputs])
    return Graph(data["name"], module, inputs, decode(data["outputs"]))


def _decode_nodes(data: list[Json]) -> fx.GraphModule:
    graph, attributes = fx.Graph(), dict[str, Any]()
    nodes: list[fx.Node] = []
    for entry in data:
        operation = entry["op"]
        args = decode(entry.get("args", {"tuple": []}), nodes)
        kwargs = decode(entry.get("kwargs", {"dict": []}), nodes)
        if operation == "placeholder":
            nodes.append(graph.placeholder(entry["name"]))
        elif operation == "get_attr":
            attributes[entry["target"]] = _decode_nodes(entry["module"])
            nodes.append(graph.create_node("get_attr", entry["target"]))
        elif operation == "call_function":
            nodes.append(graph.call_function(_target(entry["target"]), args, kwargs))
        elif operation == "output":
            nodes.append(graph.output(*args))
        else:
            raise Unreadable(f"Unknown kind of node {operation!r}")
    graph.lint()
    return graph_module(attributes, graph)
