"""Values of nodes are derived from the inputs of a graph, once for all operands that are alike."""

from typing import Any

import pytest
import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.compiled_graphs import Tensors, graph_for_many_sizes
from poptorch._ir.propagation import propagate_values
from poptorch._ir.symbolic import Symbols, example_sizes


class Counting(TorchDispatchMode):
    """Counts calls of an operator."""

    def __init__(self, target: object) -> None:
        super().__init__()
        self.calls, self._target = 0, target

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += func is self._target
        return func(*args, **(kwargs or {}))


def layers(*given: torch.Tensor) -> tuple[Tensors, Tensors]:
    *weights, x = given
    for weight in weights:
        x = (x.reshape(-1, 8) @ weight).exp().reshape(x.shape)
    return [x, x.mT], []


def traced() -> tuple[torch.fx.GraphModule, Symbols, Tensors]:
    """Return a graph of three equal layers for rows of any length, and its inputs."""
    examples = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(4, 5, 8)]
    module, _, slots = graph_for_many_sizes(layers, examples, dim=1)
    symbols = Symbols(example_sizes(slots))
    return module, symbols, [symbols.tensor(slot) for slot in slots]


def test_values_have_the_shapes_strides_and_types_that_torch_derives() -> None:
    module, symbols, inputs = traced()
    FakeTensorProp(module, symbols.mode).propagate_dont_convert_inputs(*inputs)
    expected = {node: node.meta["val"] for node in module.graph.nodes if node.op != "output"}
    propagate_values(module, inputs, symbols.mode)

    for node, value in expected.items():
        found = node.meta["val"]
        if isinstance(value, torch.Tensor):
            assert str(found.shape) == str(value.shape)
            assert str(found.stride()) == str(value.stride())
            assert found.dtype is value.dtype
        else:
            assert str(found) == str(value)


def test_an_operator_of_equal_layers_runs_once() -> None:
    module, symbols, inputs = traced()
    with Counting(torch.ops.aten.mm.default) as products:
        propagate_values(module, inputs, symbols.mode)

    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 3
    assert products.calls == 1


@pytest.mark.parametrize("number", [1.0, True])
def test_numbers_that_are_equal_and_of_different_types_are_told_apart(number: object) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    results = [graph.call_function(torch.ops.aten.mul.Tensor, (x, each)) for each in (1, number)]
    graph.output(tuple(results))
    symbols = Symbols({})
    with symbols.mode:
        given = torch.empty(3, dtype=torch.int32)
    propagate_values(torch.fx.GraphModule({}, graph), [given], symbols.mode)

    assert results[0].meta["val"].dtype is torch.int32
    assert results[1].meta["val"].dtype is (given * number).dtype
