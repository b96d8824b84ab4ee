"""Loops and branches as operators of a graph: torch's own higher-order operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._base import private

Tensors = Sequence[torch.Tensor]
Function = Callable[..., list[torch.Tensor]]


def repeat(
    count: int, body: fx.GraphModule, inputs: Tensors, captured: Tensors
) -> list[torch.Tensor]:
    """Record a loop that runs a traced body ``count`` times."""

    def more(done: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return done < count

    def step(done: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (done + 1, *_fresh(body(*values)))

    first: Any = (torch.zeros((), dtype=torch.int64), *_fresh(inputs))
    _, *results = private.while_loop_op(more, step, first, tuple(_separate(captured)))
    return list(results)


def branch(
    condition: torch.Tensor, taken: Function, otherwise: Function, operands: Tensors
) -> list[torch.Tensor]:
    """Record a choice between two traced functions of the same operands."""

    def first(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_fresh(taken(*values)))

    def second(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_fresh(otherwise(*values)))

    return list(private.cond_op(condition.reshape(()), first, second, tuple(_separate(operands))))


def is_control_flow(node: fx.Node) -> bool:
    """Tell whether a node runs graphs of its own."""
    return getattr(node.target, "namespace", None) == "higher_order"


def parts(graph: fx.Graph, node: fx.Node) -> list[fx.Graph]:
    """Return the graphs that a node of control flow runs."""
    owner = graph.owning_module
    assert owner is not None
    named = [a.target for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    read = [getattr(owner, str(name)) for name in named]
    return [part.graph for part in read if isinstance(part, fx.GraphModule)]


def first_operand(node: fx.Node) -> fx.Node:
    """Return the first tensor that a node of control flow reads."""
    (operand, *_) = (a for a in node.all_input_nodes if a.op != "get_attr")
    return operand


def _fresh(tensors: Tensors) -> list[torch.Tensor]:
    """Copies: what enters and leaves these operators must not share memory."""
    return [tensor.clone() for tensor in tensors]


def _separate(tensors: Tensors) -> list[torch.Tensor]:
    """Copy the tensors that share memory with an earlier one."""
    seen: set[Any] = set()
    result = []
    for tensor in tensors:
        storage = tensor.untyped_storage()._cdata
        result.append(tensor.clone() if storage in seen else tensor)
        seen.add(storage)
    return result
