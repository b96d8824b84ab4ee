"""The operations and rounds of single operators, read off their shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import poptorch
from helpers.wrapping import Calling, options
from poptorch._cost.operations import flops_of, rounds_of

ROWS, INNER, COLUMNS = 6, 8, 4
ONES = torch.ones(ROWS, INNER)


def operators(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Node]:
    """The operators that a function of some tensors is compiled to."""
    wrapper = poptorch.inferenceModel(Calling(function), options())
    wrapper.compile(*inputs)
    return [node for each in wrapper.plan().program.graphs.values() for node in each.operators]


def flops(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    return sum(map(flops_of, operators(function, *inputs)))


def rounds(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    return max(map(rounds_of, operators(function, *inputs)))


@pytest.mark.parametrize("product", [torch.mm, lambda x, y: torch.addmm(y[0], x, y)])
def test_a_product_has_an_addition_and_a_multiplication_for_each_term(product: Any) -> None:
    assert flops(product, ONES, torch.ones(INNER, COLUMNS)) == 2 * ROWS * INNER * COLUMNS


def test_a_batch_of_products_has_as_many_operations_as_its_members() -> None:
    left, right = torch.ones(3, ROWS, INNER), torch.ones(3, INNER, COLUMNS)

    assert flops(torch.bmm, left, right) == 3 * 2 * ROWS * INNER * COLUMNS


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_multiplies_every_weight_at_every_place(groups: int) -> None:
    image, weight = torch.ones(2, 4, 9, 9), torch.ones(6, 4 // groups, 3, 3)

    found = flops(lambda x, w: F.conv2d(x, w, groups=groups), image, weight)

    places = 2 * 7 * 7
    assert found == 2 * places * weight.numel()


def test_loops_over_elements_count_no_operations() -> None:
    assert flops(lambda x: (x.tanh() + 1).sum(), ONES) == 0


def test_a_loop_has_the_operations_of_its_body_as_often_as_it_runs() -> None:
    square = torch.ones(INNER, INNER)

    found = flops(lambda x, w: poptorch.for_loop(5, lambda y: y @ w, [x])[0], ONES, square)

    assert found == 5 * 2 * ROWS * INNER * INNER


def test_a_product_in_pieces_goes_once_over_its_rows_for_each_piece() -> None:
    mode = poptorch.MatMulSerializationMode.OutputChannels
    right = torch.ones(INNER, COLUMNS)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return poptorch.serializedMatMul(x, y, mode, 2)

    assert rounds(product, ONES, right) == 2
    assert flops(product, ONES, right) == 2 * ROWS * INNER * COLUMNS


def test_an_lstm_goes_over_its_weights_at_every_step() -> None:
    layer = nn.LSTM(INNER, COLUMNS, batch_first=True)
    wrapper = poptorch.inferenceModel(layer.eval(), options())
    wrapper.compile(torch.ones(2, 7, INNER))
    graphs = wrapper.plan().program.graphs.values()

    assert max(rounds_of(node) for graph in graphs for node in graph.operators) == 7


def test_an_elementwise_operator_goes_over_its_operands_once() -> None:
    assert rounds(torch.tanh, ONES) == 1
