"""Operators that do something besides computing their result, and the order they do it in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .control import first_operand, is_control_flow, parts
from .library import define

_EFFECTS: set[Any] = set()
AFTER = ", Tensor[] after) -> "


def define_effect(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], **rest: Any
) -> Any:
    """Define an operator with an effect; its last argument is ``after``."""
    assert AFTER in schema, f"{name} needs an argument 'after'"

    def refuse(*_: object) -> None:
        raise NotImplementedError(f"poptorch::{name} runs once per micro-batch, in order")

    defined = define(name, schema, kernel, fake, vmap=refuse, **rest)
    _EFFECTS.add(defined)
    return defined


def _pass_on(x: torch.Tensor, after: list[torch.Tensor]) -> torch.Tensor:
    return x.clone()


wait = define_effect("wait", f"(Tensor x{AFTER}Tensor", _pass_on, _pass_on)


def has_effects(graph: fx.Graph) -> bool:
    """Tell whether a graph, or a loop or branch in it, calls an operator with an effect."""
    return any(is_effect(graph, node) for node in graph.nodes)


def is_effect(graph: fx.Graph, node: fx.Node) -> bool:
    """Tell whether a node of a graph does something besides computing its result."""
    if is_control_flow(node):
        return any(has_effects(part) for part in parts(graph, node))
    return node.target in _EFFECTS


def chain(graph: fx.Graph) -> None:
    """Make every effect of a graph wait for the one before it."""
    previous: fx.Node | None = None
    for node in [node for node in graph.nodes if is_effect(graph, node)]:
        if previous is not None:
            _wait_for(graph, node, _result_of(previous))
        previous = node


def _wait_for(graph: fx.Graph, node: fx.Node, earlier: fx.Node) -> None:
    if not is_control_flow(node):
        node.args = (*node.args[:-1], [earlier])
        return
    operand = first_operand(node)
    with graph.inserting_before(node):
        waiting = graph.call_function(wait, (operand, [earlier]))
    waiting.meta["val"] = operand.meta["val"]
    node.replace_input_with(operand, waiting)


def _result_of(node: fx.Node) -> fx.Node:
    """A tensor among the results of an effect."""
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    part = next((user for user in node.users if user.target is operator.getitem), None)
    assert part is not None, "an effect without a used result is dead code"
    return part
