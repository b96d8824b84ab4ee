"""Define loops, branches and operators with effects, and keep the order of effects.

An operator with an effect takes ``Tensor[] after``: results that must exist before it runs. This
chain keeps effects in order with every compiler. Unused ones are removed like other dead code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from .._base import private
from .._base.thread_safety import holding
from .._ir.operators import bodies
from .._ir.tensors import Tensors
from .library import define

Function = Callable[..., list[torch.Tensor]]
# Whether bodies are already graphs. User code calls these operators with functions.
recording: ContextVar[bool] = ContextVar("poptorch_recording", default=False)


def repeat(
    count: int, body: fx.GraphModule, inputs: Tensors, captured: Tensors
) -> list[torch.Tensor]:
    def more(done: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return done < count

    def step(done: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        return [done + 1, *body(*values)]

    return loop(more, step, [torch.zeros((), dtype=torch.int64), *inputs], captured)[1:]


def loop(
    more: Callable[..., torch.Tensor], step: Function, inputs: Tensors, captured: Tensors
) -> list[torch.Tensor]:
    def fresh_step(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_fresh(step(*values)))

    first = tuple(_fresh(inputs))
    with holding(recording, True):
        return list(private.while_loop_op(more, fresh_step, first, tuple(_separate(captured))))


def branch(
    condition: torch.Tensor, taken: Function, otherwise: Function, operands: Tensors
) -> list[torch.Tensor]:
    def fresh(function: Function) -> Callable[..., Any]:
        return lambda *values: tuple(_fresh(function(*values)))

    bodies = fresh(taken), fresh(otherwise)
    with holding(recording, True):
        return list(private.cond_op(condition.reshape(()), *bodies, tuple(_separate(operands))))


def is_control_flow(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "higher_order"


def _fresh(tensors: Tensors) -> list[torch.Tensor]:
    """Return copies, because what enters and leaves these operators must not share memory."""
    return [tensor.clone() for tensor in tensors]


def _separate(tensors: Tensors) -> list[torch.Tensor]:
    seen: set[Any] = set()
    result = []
    for tensor in tensors:
        storage = tensor.untyped_storage()._cdata
        result.append(tensor.clone() if storage in seen else tensor)
        seen.add(storage)
    return result


_EFFECTS: set[Any] = set()


def define_effect(name: str, *parts: Any, **rest: Any) -> Any:
    def refuse(*_: object) -> None:
        raise NotImplementedError(f"poptorch::{name} runs once per micro-batch, in order")

    defined = define(name, *parts, vmap=refuse, **rest)
    _EFFECTS.add(defined)
    return defined


def _pass_on(x: torch.Tensor, after: list[torch.Tensor]) -> torch.Tensor:
    return x.clone()


wait = define_effect("wait", "(Tensor x, Tensor[] after) -> Tensor", _pass_on, _pass_on)


def is_effect(node: fx.Node) -> bool:
    if is_control_flow(node):
        return any(is_effect(inner) for body in bodies(node) for inner in body.nodes)
    return node.target in _EFFECTS


def chain(graph: fx.Graph) -> None:
    previous: fx.Node | None = None
    for node in list(filter(is_effect, graph.nodes)):
        if previous is not None:
            _wait_for(graph, node, _result_of(previous))
        previous = node


def _wait_for(graph: fx.Graph, node: fx.Node, earlier: fx.Node) -> None:
    if not is_control_flow(node):
        node.args = (*node.args[:-1], [earlier])
        return
    operand = next(each for each in node.all_input_nodes if each.op != "get_attr")
    with graph.inserting_before(node):
        waiting = graph.call_function(wait, (operand, [earlier]))
    waiting.meta["val"] = operand.meta["val"]
    node.replace_input_with(operand, waiting)


def _result_of(node: fx.Node) -> fx.Node:
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    part = next((user for user in node.users if user.target is operator.getitem), None)
    assert part is not None, "an effect without a used result is dead code"
    return part
