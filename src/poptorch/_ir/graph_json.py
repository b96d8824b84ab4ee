"""Convert graphs to JSON. Only compiler processes may read them, because a foreign graph could run
any code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .._base import json_codec, source
from .._base.json_codec import Json, Unreadable
from .graph import Graph, graph_module
from .operators import Operator
from .slots import Kind, Slot

_FUNCTIONS: dict[str, Callable[..., Any]] = (
    {
        f"operator.{name}": getattr(operator, name)
        for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow")
    }
    | {
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_max", "sym_min", "sym_sqrt")
    }
    | {f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc")}
    | {"round": round}
)


def encode(value: Any) -> Json:
    """Return a value, which may contain graphs, as JSON, or raise a TypeError."""
    return json_codec.encode(value, _graph_form)


def _graph_form(value: Any) -> Json:
    if not isinstance(value, Graph):
        return None
    return {
        "graph": {
            "nodes": encode_nodes(value.module),
            "name": value.name,
            "inputs": encode(value.inputs),
            "outputs": encode(value.outputs),
        }
    }


def encode_nodes(module: fx.GraphModule) -> list[Json]:
    numbers = {node: at for at, node in enumerate(module.graph.nodes)}
    return [_encode_node(node, module, numbers) for node in module.graph.nodes]


def _encode_node(node: fx.Node, module: fx.GraphModule, numbers: dict[fx.Node, int]) -> Json:
    def number(value: Any) -> Json:
        return {"node": numbers[value]} if isinstance(value, fx.Node) else None

    data: dict[str, Json] = {"op": node.op}
    if node.op == "placeholder":
        return {**data, "name": node.name}
    if node.op == "get_attr":
        inner = getattr(module, str(node.target))
        if not isinstance(inner, fx.GraphModule):
            raise TypeError(f"attribute {node.target} is not a graph")
        return {**data, "target": node.target, "module": encode_nodes(inner)}
    data["args"] = json_codec.encode(node.args, number)
    if node.kwargs:
        data["kwargs"] = json_codec.encode(dict(node.kwargs), number)
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


def decode(data: Json) -> Graph:
    """Return the graph that was passed to ``encode``, with nodes without values, or raise
    Unreadable.
    """
    content = data["graph"]
    read = partial(json_codec.decode, classes={"Slot": Slot, "Kind": Kind})
    module = _decode_nodes(content["nodes"])
    return Graph(content["name"], module, read(content["inputs"]), read(content["outputs"]))


def _decode_nodes(data: list[Json]) -> fx.GraphModule:
    graph, attributes = fx.Graph(), dict[str, Any]()
    nodes: list[fx.Node] = []
    read = partial(json_codec.decode, readers={"node": lambda number: nodes[number]})
    for entry in data:
        operation = entry["op"]
        args, kwargs = read(entry.get("args", [])), read(entry.get("kwargs", {"dict": []}))
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
            raise Unreadable(
                "The saved program contains a node of an unknown kind",
                got=repr(operation),
                fix="load it with the version of poptorch that saved it, or compile again",
            )
    graph.lint()
    return graph_module(attributes, graph)
