"""Convolutions as products of gathered windows compute what ATen's convolutions do."""

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.closeness import near
from poptorch._cpu import convolutions
from poptorch._cpu.lowering import memory_order

aten = torch.ops.aten
BATCH, OUTPUTS = 8, 5
ALONE = convolutions.Convolutions(torch.fx.Graph())
convolution, convolution_backward = ALONE.convolution, ALONE.convolution_backward

GEOMETRIES = [
    ((9, 8), (kernel, kernel + 1), stride, padding, dilation)
    for kernel, stride in itertools.product((1, 2, 3), repeat=2)
    for padding, dilation in itertools.product((0, 1), (1, 2))
]
OTHER_DIMENSIONS = [(space, (3,) * len(space), 2, 1, 1) for space in ((11,), (5, 4, 6))]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, int, int]
CASES = pytest.mark.parametrize("geometry", GEOMETRIES + OTHER_DIMENSIONS)
SIZES = pytest.mark.parametrize("rows, channels", [(BATCH, 3), (2, 3), (2, 8)])


def same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, **near(BATCH * 9 * 8), check_stride=False)


def operands(geometry: Geometry, rows: int, channels: int) -> tuple[Any, ...]:
    """Return an input, a weight, and the other arguments of a convolution."""
    space, kernel, *numbers = geometry
    rank = len(space)
    x, weight = torch.randn(rows, channels, *space), torch.randn(OUTPUTS, channels, *kernel)
    return x, weight, (*([number] * rank for number in numbers), False, [0] * rank, 1)


@CASES
@SIZES
@pytest.mark.parametrize("has_bias", [True, False])
def test_results_equal_atens(geometry: Geometry, rows: int, channels: int, has_bias: bool) -> None:
    x, weight, rest = operands(geometry, rows, channels)
    bias = torch.randn(OUTPUTS) if has_bias else None
    same(convolution(x, weight, bias, *rest), aten.convolution(x, weight, bias, *rest))


@CASES
@SIZES
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_equal_atens(
    geometry: Geometry, rows: int, channels: int, has_bias: bool
) -> None:
    x, weight, rest = operands(geometry, rows, channels)
    grad = torch.randn_like(aten.convolution(x, weight, None, *rest))
    arguments = (grad, x, weight, [OUTPUTS], *rest, [True, True, has_bias])

    of_x, of_weight, of_bias = convolution_backward(*arguments)

    expected = aten.convolution_backward(*arguments)
    same((of_x, of_weight), tuple(expected)[:2])
    if has_bias:
        same(of_bias, expected[2])
    else:
        assert of_bias is None


@pytest.mark.parametrize(
    "outputs, size, kernel, is_product",
    [
        (16, 6, 3, True),
        (64, 20, 3, False),
        (8, 40, 3, False),
        (64, 40, 1, True),
        (4096, 1, 1, False),
    ],
)
def test_a_convolution_that_takes_less_than_a_call_of_a_library_is_a_product(
    outputs: int, size: int, kernel: int, is_product: bool
) -> None:
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    x, weight = torch.empty(1, 64, size, size), torch.empty(outputs, 64, kernel, kernel)

    traced = make_fx(lambda *given: convolution(*given, None, *rest), tracing_mode="fake")(
        x, weight
    )

    targets = {node.target for node in traced.graph.nodes}
    assert (aten.mm.default in targets) == is_product
    assert (aten.convolution.default in targets) == (not is_product)


LEFT = pytest.mark.parametrize("channels, outputs, groups", [(4, 4, 1), (16, 32, 1), (4, 4, 4)])


def for_the_library(channels: int, outputs: int, groups: int) -> tuple[Any, ...]:
    x, weight = (
        torch.randn(BATCH - 1, channels, 5, 6),
        torch.randn(outputs, channels // groups, 3, 3),
    )
    return x, weight, ([1, 1], [0, 0], [1, 1], False, [0, 0], groups)


@LEFT
def test_other_convolutions_are_left_to_the_library_channels_last_if_these_fill_blocks(
    channels: int, outputs: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_FEW_GATHERED", 0)
    x, weight, rest = for_the_library(channels, outputs, groups)

    y = convolution(x, weight, None, *rest)

    same(y, aten.convolution(x, weight, None, *rest))
    assert memory_order(y) == ((0, 2, 3, 1) if channels == 16 else (0, 1, 2, 3))


@LEFT
def test_gradients_of_other_convolutions_are_left_to_the_library(
    channels: int, outputs: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_FEW_GATHERED", 0)
    x, weight, rest = for_the_library(channels, outputs, groups)
    grad = torch.randn_like(aten.convolution(x, weight, None, *rest))
    arguments = (grad, x, weight, None, *rest, [True, True, False])

    found = convolution_backward(*arguments)

    same(found[:2], tuple(aten.convolution_backward(*arguments))[:2])
