"""Steps of optimizers are written out in torch's operators from one small shape for all shapes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch._ir.operators import name_of
from poptorch._ops import written_out
from poptorch._ops.optimizer_steps import BY_OPERATOR

optim = poptorch.optim
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd_combined_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
    "adam_step": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "lamb_step": lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
    "rmsprop_step": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


def trained(make: Callable[[Any], Any], layers: int = 2) -> Any:
    """Return an executor that has made one call."""
    torch.manual_seed(0)

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).tanh()
        return poptorch.identity_loss(x.square(), "mean")

    model = Having(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(layers)))
    wrapped = poptorch.trainingModel(model, options(), make(model.parameters()))
    wrapped(normal(8, 6))
    return wrapped


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_formula_is_written_out_for_each_shape_as_it_would_be_traced_for_it(name: str) -> None:
    """One small shape is traced for all shapes; the operators and their shapes stay the same."""
    graph = trained(OPTIMIZERS[name]).plan().program.graphs["step"]
    for node in graph.operators:
        if name_of(node) != f"poptorch.{name}":
            continue

        written, traced = _written_and_traced(node)

        assert written == traced


def _written_and_traced(node: torch.fx.Node) -> tuple[list[Any], list[Any]]:
    """Return the operators of a step, by the small shape and by the node's own shape."""

    def given(argument: Any) -> Any:
        if not isinstance(argument, torch.fx.Node):
            return argument
        value = argument.meta["val"]
        return written_out._Given(next(numbers), tuple(value.shape), value.dtype)

    numbers = itertools.count()
    args = torch.fx.node.map_aggregate(node.args, given)
    step = BY_OPERATOR[node.target]
    call = written_out._Call(step.written_out, repr(args), args)
    exact = written_out._Operators.of(written_out._traced(call))
    return _described(written_out._operators(call)), _described(exact)


def _described(operators: written_out._Operators) -> list[Any]:
    return [
        (str(node.target), str(node.args), str(node.kwargs), value.shape, value.dtype)
        for node, value in operators.values.items()
    ]
