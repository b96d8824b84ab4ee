"""``serializedMatMul``: the product of torch.matmul, in pieces."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.memory import peak_of_call
from helpers.wrapped import normal
from helpers.wrapping import (
    Calling,
    Having,
    agrees,
    graph_of,
    infer,
    options,
    training,
    trains_alike,
)
from poptorch import MatMulSerializationMode as Mode

CUT = [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels]
SHAPES = [((3, 4, 6), (6, 8)), ((2, 1, 4, 6), (3, 6, 8)), ((6,), (6, 8)), ((4, 6), (6,))]


def product(shape: tuple[int, ...], *rest) -> Having:
    """With a trained operand, or of two; in pieces if ``rest`` says so."""

    def forward(model, x):
        multiply = poptorch.serializedMatMul if rest else torch.matmul
        out = multiply(model.scale * x, model.weight, *rest)
        return out, poptorch.identity_loss(out.square().sum(), "none")

    return Having(forward, weight=nn.Parameter(normal(*shape)), scale=nn.Parameter(torch.ones(())))


@pytest.mark.parametrize("mode", CUT)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_whole_product(mode: Mode, shapes) -> None:
    left, right = shapes
    vector = {Mode.InputChannels: len(left), Mode.OutputChannels: len(right)}.get(mode) == 1
    cut = product(right, mode, 1 if vector else 2)
    trains_alike(cut, normal(1, *left, seed=1).squeeze(0), eager=product(right), lr=0.001)


@pytest.mark.spec("ops", 18)
@pytest.mark.parametrize(
    "rest", [(Mode.Disabled, 7), (Mode.ReducingDim,), (Mode.ReducingDim, 2, True)]
)
def test_it_can_be_left_whole(rest) -> None:
    agrees(lambda a, b: poptorch.serializedMatMul(a, b, *rest), normal(2, 2), normal(2, 2, seed=1))


def test_micro_batches_side_by_side_are_one_product() -> None:
    cut, x = product((6, 8), Mode.OutputChannels, 4), normal(6, 4, 6)
    model = trains_alike(cut, x, eager=product((6, 8)), accumulation=3, lr=0.001)
    targets = [node.target for node in graph_of(model, "step").nodes]
    assert targets.count(torch.ops.poptorch.serialized_matmul.default) == 3  # and two gradients


def test_operands_that_are_batched_differently_in_lanes() -> None:
    given, opts = (normal(8, 4, 6), normal(8, 6, 5)), options(iterations=4)
    agrees(lambda x, y: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 3), *given, opts=opts)


@pytest.mark.parametrize("mode", CUT)
def test_peak_memory_falls_with_the_factor(mode: Mode) -> None:
    if mode is not Mode.InputChannels:
        # The right operand is copied for every row of the batch, 64 times what the weight takes.
        x, models = normal(64, 1, 2, 128), (product((1, 2, 128, 64), mode, n) for n in (1, 8))
        whole, cut = (peak_of_call(training(model), x) for model in models)
        assert cut < 0.4 * whole

    def exactly(factor: int) -> int:
        model = Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True))
        halves = normal(256, 256).half(), normal(256, 256, seed=1).half()
        return peak_of_call(poptorch.inferenceModel(model, options()), *halves)

    assert exactly(2) > 1.2 * exactly(8)


def test_sums_of_halves_keep_their_precision() -> None:
    def total(keep: bool) -> float:
        # 2048 + 1 is no half, so that sums in half precision stay at 2048.
        given = torch.ones(1, 4096).half(), torch.ones(4096, 1).half()
        mode = Mode.ReducingDim
        return infer(lambda x, y: poptorch.serializedMatMul(x, y, mode, 4096, keep), *given).item()

    assert (total(False), total(True)) == (2048.0, 4096.0)
