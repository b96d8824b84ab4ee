"""Operators that do something besides computing their result, and the order they do it in.

Such an operator takes ``Tensor[] after``: results that must exist before it runs. Traced in
program order and chained through it, effects keep their order under every compiler, which may
otherwise move operators as the data allows. Unused ones are dead code like any other operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .library import NAMESPACE, define

_EFFECTS: set[Any] = set()
AFTER = ", Tensor[] after) -> "


def define_effect(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], **parts: Any
) -> Any:
    """Define an operator with an effect; its last argument is ``after``.

    It runs once per micro-batch, one micro-batch after another, so it cannot be batched over
    several: ``vmap`` refuses it.
    """
    assert AFTER in schema, f"{name} needs an argument 'after'"
    operator = define(name, schema, kernel, fake, **parts)

    def refuse(*_: object) -> None:
        raise NotImplementedError(f"poptorch::{name} runs once per micro-batch, in order")

    torch.library.register_vmap(f"{NAMESPACE}::{name}", refuse)
    _EFFECTS.add(operator)
    return operator


def is_effect(node: fx.Node) -> bool:
    """Tell whether a node of a graph calls an operator with an effect."""
    return node.target in _EFFECTS


def chain(graph: fx.Graph) -> None:
    """Make every effect of a graph wait for the one before it."""
    previous: fx.Node | None = None
    for node in graph.nodes:
        if not is_effect(node):
            continue
        if previous is not None:
            node.args = (*node.args[:-1], [_tensor_of(graph, previous)])
        previous = node


def _tensor_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A tensor among the results of an effect."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    used = next((user for user in node.users if user.op == "call_function"), None)
    assert used is not None, "an effect without a used result is dead code"
    return used
