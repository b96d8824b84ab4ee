"""``serializedMatMul``: a product in pieces, for less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import slow_but_the_first
from helpers.memory import peak_of_call
from helpers.wrapping import (
    Calling,
    Having,
    agrees,
    graph_of,
    normal,
    options,
    training,
    trains_alike,
    unchecked,
)
from poptorch import MatMulSerializationMode as Mode

MODES = [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels]
SHAPES = [((3, 4, 6), (6, 8)), ((2, 1, 4, 6), (3, 6, 8)), ((6,), (6, 8)), ((4, 6), (6,))]

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_pieces(mode: Mode, factor: int) -> Multiply:
    """Return a product in this number of pieces."""
    return lambda a, b: poptorch.serializedMatMul(a, b, mode, factor)


def product(shape: tuple[int, ...], multiply: Multiply = torch.matmul) -> Having:
    """Return a model of one product with a trained operand of a shape, and a trained factor."""

    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = multiply(model.scale * x, model.weight)
        return out, poptorch.identity_loss(out.square().sum(), "none")

    return Having(forward, weight=nn.Parameter(normal(*shape)), scale=nn.Parameter(torch.ones(())))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_whole_product(
    mode: Mode, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """A vector has one row or column, which cannot be cut."""
    left, right = shapes
    cut_is_a_vector = {Mode.InputChannels: len(left), Mode.OutputChannels: len(right)}.get(
        mode
    ) == 1
    factor = 1 if cut_is_a_vector else 2
    x = normal(1, *left, seed=1).squeeze(0)

    trains_alike(product(right, in_pieces(mode, factor)), x, eager=product(right), lr=0.001)


@pytest.mark.spec("ops", 18)
@pytest.mark.parametrize(
    "settings", [(Mode.Disabled, 7), (Mode.ReducingDim,), (Mode.ReducingDim, 2, True)]
)
def test_a_product_can_be_left_whole(settings: tuple[Any, ...]) -> None:
    agrees(
        lambda a, b: poptorch.serializedMatMul(a, b, *settings), normal(2, 2), normal(2, 2, seed=1)
    )


def test_micro_batches_side_by_side_are_one_product() -> None:
    """The program has one product for the value, and two for the gradients."""
    cut = product((6, 8), in_pieces(Mode.OutputChannels, 4))

    executor = trains_alike(cut, normal(6, 4, 6), eager=product((6, 8)), accumulation=3, lr=0.001)

    targets = [node.target for node in graph_of(executor, "step").nodes]
    assert targets.count(torch.ops.poptorch.serialized_matmul.default) == 3


def test_micro_batches_side_by_side_multiply_two_inputs() -> None:
    agrees(
        in_pieces(Mode.ReducingDim, 3),
        normal(8, 4, 6),
        normal(8, 6, 5),
        opts=options(iterations=4),
    )


@pytest.mark.parametrize("mode", slow_but_the_first([Mode.ReducingDim, Mode.OutputChannels]))
def test_eight_pieces_train_in_less_than_half_of_the_memory(mode: Mode) -> None:
    """The right operand is copied for every row of the batch: 64 times the memory of the weight."""
    x = normal(64, 1, 2, 128)

    whole, cut = (
        peak_of_call(training(product((1, 2, 128, 64), in_pieces(mode, factor))), x)
        for factor in (1, 8)
    )

    assert cut < 0.4 * whole


@pytest.mark.parametrize("mode", MODES)
def test_exact_products_of_halves_take_less_memory_in_more_pieces(mode: Mode) -> None:
    def peak(factor: int) -> int:
        model = Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True))
        halves = normal(256, 256).half(), normal(256, 256, seed=1).half()
        return peak_of_call(poptorch.inferenceModel(model, options()), *halves)

    assert peak(factor=2) > 1.2 * peak(factor=8)


@pytest.mark.parametrize("keep_precision, expected", [(False, 2048), (True, 4096)])
def test_sums_of_halves_keep_their_precision_if_asked_to(
    keep_precision: bool, expected: int
) -> None:
    """2048 + 1 is no half number, so that sums of ones in half precision stay at 2048."""
    ones = torch.ones(1, 4096).half(), torch.ones(4096, 1).half()
    cut = Calling(
        lambda x, y: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 4096, keep_precision)
    )
    # In eager PyTorch the product is never cut.
    model = poptorch.inferenceModel(cut, unchecked())

    assert model(*ones).item() == expected
