"""Run a captured graph on the values of eager PyTorch, including its random draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .._ir.closeness import with_arithmetic
from .._ir.graph import Graph
from .._ir.operators import draws, may_view
from .._ops.context import EagerRun, running_eagerly
from ..backends.prepare import accept_strides
from ..backends.stopwatch import OperatorInterpreter
from .eager_draws import EagerDraw, handed_over

NodeObserver = Callable[[fx.Node, Any], object]


def replay(
    graph: Graph,
    values: Mapping[str, torch.Tensor],
    drawn: Sequence[EagerDraw],
    nudge: bool = False,
    seen: NodeObserver = lambda node, result: None,
) -> dict[str, torch.Tensor]:
    """Return a graph's results by slot key.

    Args:
        graph: the captured graph.
        values: its inputs by slot key.
        drawn: the random values.
        nudge: let every operator round its results once more, at random.
        seen: called with each operator and its result.
    """
    generator = torch.Generator().manual_seed(0)

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        if draws(node):
            return handed_over(node, drawn)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if nudge and node.all_input_nodes and not may_view(node):
            result = map_aggregate(result, lambda each: _rounded(each, generator))
        seen(node, result)
        return result

    interpreter = OperatorInterpreter(accept_strides(graph.copy().module), call)
    inputs = [values[slot.key] for slot in graph.inputs]
    as_recorded = torch.autocast("cpu", enabled=False)  # the graph contains the casts
    with torch.no_grad(), running_eagerly(EagerRun()), as_recorded:
        results = interpreter.run(*inputs)
    return {slot.key: value for slot, value in zip(graph.outputs, results, strict=True)}


def _rounded(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = with_arithmetic(value)
    real = wide.real if wide.is_complex() else wide
    signs = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1)
    return (wide * (1 + signs.to(real.dtype) * torch.finfo(value.dtype).eps)).to(value.dtype)
