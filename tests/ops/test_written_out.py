"""Steps of optimizers are written out in torch's operators from one small shape for all shapes."""

import itertools
from typing import Any

import pytest
import torch

from helpers.optimizer_steps import OPTIMIZERS, trained
from poptorch._ir.operators import name_of
from poptorch._ops import written_out
from poptorch._ops.optimizer_formulas import BY_OPERATOR


@pytest.mark.slow
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
        return written_out._ContiguousTensor(next(numbers), tuple(value.shape), value.dtype)

    numbers = itertools.count()
    args = torch.fx.node.map_aggregate(node.args, given)
    step = BY_OPERATOR[node.target]
    call = written_out._DecomposedCall(step.written_out, repr(args), args)
    exact = written_out._Operators.of(written_out._traced(call))
    return _described(written_out._operators(call)), _described(exact)


def _described(operators: written_out._Operators) -> list[Any]:
    return [
        (str(node.target), str(node.args), str(node.kwargs), value.shape, value.dtype)
        for node, value in operators.values.items()
    ]
