"""Values of nodes are derived from the inputs of a graph, once for all operands that are alike."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch._capture import trace
from poptorch._ir import slots
from poptorch._ir.propagation import propagate_values
from poptorch._ir.symbolic import Symbols


class Counting(TorchDispatchMode):
    """Counts calls of an operator."""

    def __init__(self, target: object) -> None:
        super().__init__()
        self.calls, self._target = 0, target

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += func is self._target
        return func(*args, **(kwargs or {}))


def layers(flat: list[torch.Tensor]) -> list[torch.Tensor]:
    x, *weights = flat
    for weight in weights:
        x = (x.reshape(-1, 8) @ weight).exp().reshape(x.shape)
    return [x, x.T if x.dim() == 2 else x.mT]


def traced(symbols: Symbols, count: int = 3) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    given = [slots.batch_input(0, (4, 5, 8), torch.float32, ("", "s0", ""))]
    given += [slots.batch_input(at + 1, (8, 8), torch.float32) for at in range(count)]
    module, _ = trace.trace(layers, [symbols.tensor(slot) for slot in given])
    return module, [symbols.tensor(slot) for slot in given]


def test_values_have_the_shapes_strides_and_types_of_the_trace() -> None:
    symbols = Symbols({"s0": 5})
    module, inputs = traced(symbols)
    before = {node: node.meta["val"] for node in module.graph.nodes if "val" in node.meta}
    propagate_values(module, inputs, symbols.mode)

    for node, expected in before.items():
        value = node.meta["val"]
        if isinstance(expected, torch.Tensor):
            assert str(value.shape) == str(expected.shape)
            assert str(value.stride()) == str(expected.stride())
            assert value.dtype is expected.dtype
        else:
            assert str(value) == str(expected)


def test_an_operator_of_equal_layers_runs_once() -> None:
    symbols = Symbols({"s0": 5})
    module, inputs = traced(symbols)
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
