"""Lowering keeps the order of elements in memory, and computes repeated elements once."""

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.closeness import near
from helpers.compiled_graphs import Tensors
from poptorch._cpu.kernels import Kernel, Kernels
from poptorch._cpu.lowering import OrderedReplay, lower, memory_order
from poptorch._cpu.windows import batch_first

aten = torch.ops.aten
BATCH = 8


def same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, **near(BATCH * 9 * 8), check_stride=False)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_memory_order_lists_dimensions_from_outermost_to_innermost(order: tuple[int, ...]) -> None:
    back = [order.index(dim) for dim in range(3)]
    x = torch.randn(2, 3, 4).permute(order).contiguous().permute(back)
    assert memory_order(x) == order


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(2, 3, 4)[:, ::2], id="gaps"),
        pytest.param(torch.randn(2, 3, 4).expand(5, 2, 3, 4), id="overlap"),
    ],
)
def test_elements_with_gaps_or_overlaps_have_no_memory_order(x: torch.Tensor) -> None:
    assert memory_order(x) is None


def activations(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a pointwise value, and what three operators with other needs make of it."""
    z = (x.relu() * scale).exp()
    return z, z.sum(0), z.cumsum(0), z.view(BATCH, -1)


def inputs() -> Tensors:
    return [torch.randn(BATCH, 3, 7), torch.randn(3, 1)]


def batch_innermost() -> Kernels:
    """Return a kernel whose result has the batch innermost."""

    def relu(x: torch.Tensor) -> torch.Tensor:
        return batch_first(x.relu().permute(1, 2, 0).contiguous())

    return {aten.relu.default: Kernel(relu)}


def replay(kernels: Kernels) -> OrderedReplay:
    return OrderedReplay(make_fx(activations, tracing_mode="fake")(*inputs()), kernels)


def test_values_do_not_depend_on_the_order_in_memory() -> None:
    given = inputs()
    same(tuple(replay(batch_innermost()).run(*given)), activations(*given))


def test_pointwise_operators_get_and_keep_the_order_of_their_operand() -> None:
    strides: list[tuple[int, ...]] = []

    def never(x: torch.Tensor) -> bool:
        strides.append(x.stride())
        return False

    watched = {aten.exp.default: Kernel(torch.exp, never)}

    pointwise, *_ = replay({**batch_innermost(), **watched}).run(*inputs())

    assert strides == [(1, 7 * BATCH, BATCH)]
    assert pointwise.stride() == (1, 7 * BATCH, BATCH)


def test_other_operators_get_their_operand_as_it_was_traced() -> None:
    _, _, running_sum, _ = replay(batch_innermost()).run(*inputs())
    assert running_sum.stride() == (21, 7, 1)


def test_the_code_generator_stores_a_pointwise_value_by_its_dimensions() -> None:
    traced = make_fx(replay(batch_innermost()).run, tracing_mode="fake")(*inputs())
    (exp,) = traced.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert exp.meta["val"].is_contiguous()


def spread(x: torch.Tensor) -> Tensors:
    """Apply expensive functions to each number five times."""
    y = x[:, None].expand(3, 5, 4)
    return [y.lgamma(), y.digamma() * y.log(), y.pow(2.5), torch.pow(2.0, y)]


def spread_graph() -> tuple[fx.GraphModule, torch.Tensor]:
    x = torch.rand(3, 4) + 0.1
    return make_fx(spread, tracing_mode="fake")(x), x


def test_functions_of_elements_that_share_memory_have_the_same_values() -> None:
    module, x = spread_graph()
    same(OrderedReplay(module, {}).run(x), spread(x))


@pytest.mark.parametrize("operator", [aten.lgamma, aten.digamma, aten.log], ids=str)
def test_an_expensive_function_of_elements_that_share_memory_is_computed_once(
    operator: Any,
) -> None:
    module, x = spread_graph()
    traced = make_fx(OrderedReplay(module, {}).run, tracing_mode="fake")(x)
    used = [node for node in traced.graph.nodes if node.users and node.target is operator.default]
    assert [node.meta["val"].numel() for node in used] == [x.numel()]


def scaled_by_its_norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    direction = x / y.sqrt()
    return direction / (direction * direction).sum()


def measured_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    direction = x / y.sqrt()
    norm = (direction * direction).sum()
    return torch.cat([direction * 2, norm.expand(1, 8)])


def without_expensive_operators(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    direction = x + y
    return direction / (direction * direction).sum()


def stored_shapes(function: Any) -> list[tuple[int, ...]]:
    """Return the shapes of values that the code generator is told to store."""
    given = [torch.rand(64, 8) + 0.1, torch.rand(64, 8) + 0.1]
    module = make_fx(function, tracing_mode="fake")(*given)
    output = module.graph.output_node()
    output.args = ((output.args[0],),)
    lowered = lower(module, [], given, {}, {})
    stored = lowered.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    return [tuple(node.meta["val"].shape) for node in stored]


def test_values_that_differ_only_in_the_sign_of_zero_are_both_computed() -> None:
    def signs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 0.0).signbit(), (x * -0.0).signbit()

    x = torch.tensor([1.0, -1.0])
    module = make_fx(signs)(x)

    lowered = lower(module, [], [x], {}, {})

    same(lowered(x), signs(x))


def test_an_expensive_value_that_is_scaled_by_its_norm_is_stored() -> None:
    assert stored_shapes(scaled_by_its_norm) == [(64, 8)]


def test_a_cheap_value_that_is_scaled_by_its_norm_is_computed_twice() -> None:
    assert stored_shapes(without_expensive_operators) == []


def test_a_value_that_does_not_meet_its_norm_is_not_stored() -> None:
    assert stored_shapes(measured_only) == []
