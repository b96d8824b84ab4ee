"""The code that the interpreter runs calls each operator of a graph, and drops values early."""

import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from poptorch.backends.interpreter_code import function_of

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def run(make: Callable[[fx.Graph, fx.Node], Any], attributes: Any = None) -> Any:
    """Return what a graph with one input computes from ``X``."""
    graph = fx.Graph()
    graph.output(make(graph, graph.placeholder("x")))
    return function_of(fx.GraphModule(attributes or nn.Module(), graph))(X)


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mul.Tensor, (2,), {}),
    (aten.clamp.default, (-math.inf, 3.5), {}),
    (aten.full_like.default, (math.nan,), {"dtype": torch.float64}),
    (aten._to_copy.default, (), {"dtype": torch.bfloat16, "device": torch.device("cpu")}),
    (aten.div.Tensor_mode, (2.0,), {"rounding_mode": "floor"}),
    (aten.sum.dim_IntList, ([0], True), {}),
    (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    (operator.getitem, ((slice(None), slice(0, 3, 2)),), {}),
    (operator.getitem, (1,), {}),
    (torch.Tensor.new_tensor, ([1, True],), {"dtype": None}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS, ids=str)
def test_arguments_of_all_kinds_reach_the_operator(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = run(lambda graph, x: graph.call_function(target, (x, *args), kwargs))

    want = target(X, *args, **kwargs)
    assert found.dtype == want.dtype
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def test_results_keep_their_structure() -> None:
    def make(graph: fx.Graph, x: fx.Node) -> Any:
        return (x, [graph.call_function(aten.neg.default, (x,))], {"one": (x,)}, None)

    same, (negative,), named, nothing = run(make)

    assert same is X
    assert torch.equal(negative, -X)
    assert named["one"][0] is X
    assert nothing is None


def test_attributes_of_parts_are_found() -> None:
    outer = nn.Module()
    outer.inner = nn.Linear(3, 1)

    found = run(lambda graph, x: graph.get_attr("inner.bias"), outer)

    assert found is outer.inner.bias


@pytest.mark.parametrize("is_read", [True, False])
def test_a_value_is_dropped_after_it_is_read_last(is_read: bool) -> None:
    made: list[Any] = []

    def make_value(x: torch.Tensor) -> torch.Tensor:
        value = x + 1
        made.append(weakref.ref(value))
        return value

    def is_alive(x: torch.Tensor) -> bool:
        return made[0]() is not None

    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        value = graph.call_function(make_value, (x,))
        if is_read:
            x = graph.call_function(torch.neg, (value,))
        return graph.call_function(is_alive, (x,))

    assert run(make) is False
