"""``serializedMatMul``: the product of torch.matmul, in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import Calling, graph_of, infer, options, training
from poptorch import MatMulSerializationMode as Mode

CUT = [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels]
SHAPES = [
    ((4, 6), (6, 8)),
    ((3, 4, 6), (6, 8)),
    ((3, 4, 6), (3, 6, 8)),
    ((2, 1, 4, 6), (3, 6, 8)),
    ((6,), (6, 8)),
    ((4, 6), (6,)),
    ((6,), (6,)),
]


class Product(nn.Module):
    """A product with a trained operand, or of two."""

    def __init__(self, shape: tuple[int, ...], *rest, native: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(*shape))
        self.scale = nn.Parameter(torch.ones(()))
        self.rest, self.native = rest, native

    def forward(self, x):
        lhs = self.scale * x
        if self.native:
            out = torch.matmul(lhs, self.weight)
        else:
            out = poptorch.serializedMatMul(lhs, self.weight, *self.rest)
        return out, poptorch.identity_loss(out.square().sum(), "none")


@pytest.mark.parametrize("mode", CUT)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_whole_product(mode: Mode, shapes) -> None:
    left, right = shapes
    factor = 1 if {Mode.InputChannels: len(left), Mode.OutputChannels: len(right)}.get(mode) == 1 \
        else 2  # fmt: skip
    cut = training(Product(right, mode, factor), lr=0.01)
    whole = training(Product(right, native=True), lr=0.01)
    x = normal(1, *left, seed=1).squeeze(0)
    torch.testing.assert_close(cut(x), whole(x))
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_micro_batches_side_by_side_are_one_product(backend: str) -> None:
    cut = training(Product((6, 8), Mode.OutputChannels, 4), options(backend, accumulation=3))
    whole = training(Product((6, 8), native=True), options(accumulation=3))
    x = normal(6, 4, 6)
    torch.testing.assert_close(cut(x), whole(x))
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())
    targets = [node.target for node in graph_of(cut, "step").nodes]
    assert targets.count(torch.ops.poptorch.serialized_matmul.default) == 3  # and two gradients


def test_operands_that_are_batched_differently_in_lanes() -> None:
    def forward(x, y):
        return poptorch.serializedMatMul(x, y, Mode.ReducingDim, 3)

    x, y = normal(8, 4, 6), normal(8, 6, 5)
    got = poptorch.inferenceModel(Calling(forward), options(iterations=4))(x, y)
    torch.testing.assert_close(got, x @ y)


@pytest.mark.spec("ops", 18)
def test_the_mode_is_the_enum_object() -> None:
    x = torch.ones(2, 2)
    for wrong in (("input_channels",), (Mode.ReducingDim, 2.0), (Mode.ReducingDim, True),
                  (Mode.ReducingDim, 2, 1), (None,)):  # fmt: skip
        with pytest.raises(AssertionError, match="serializedMatMul"):
            poptorch.serializedMatMul(x, x, *wrong)
    for fine in ((Mode.Disabled, 7), (Mode.ReducingDim,), (Mode.ReducingDim, 2, True)):
        assert torch.equal(poptorch.serializedMatMul(x, x, *fine), x @ x)
        assert torch.equal(infer(lambda a, f=fine: poptorch.serializedMatMul(a, a, *f), x), x @ x)


@pytest.mark.parametrize("mode", CUT)
def test_a_factor_that_does_not_divide_is_an_error_at_compilation(mode: Mode) -> None:
    x = torch.ones(4, 4)
    for factor in (3, -2, 8):
        with pytest.raises(poptorch.Error, match="must divide the dimension") as caught:
            infer(lambda a, f=factor: poptorch.serializedMatMul(a, a, mode, f), x)
        assert "test_matmul.py" in str(caught.value)


def allocated(model, *args: torch.Tensor) -> int:
    """The most bytes that torch's allocator held at once for one call."""
    model(*args)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        model(*args)
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("mode", [Mode.OutputChannels, Mode.ReducingDim])
def test_peak_memory_falls_with_the_factor(mode: Mode) -> None:
    # The right operand is copied for every row of the batch, 64 times what the weight takes.
    x, peaks = normal(64, 1, 2, 128), {}
    for factor in (1, 4, 16):
        model = training(Product((1, 2, 128, 64), mode, factor))
        peaks[factor] = allocated(model, x)
    assert peaks[4] < 0.5 * peaks[1]
    assert peaks[16] < 0.8 * peaks[4]


@pytest.mark.parametrize("mode", CUT)
def test_peak_memory_of_exact_products_of_halves_falls_with_the_factor(mode: Mode) -> None:
    x, y = normal(256, 256).half(), normal(256, 256, seed=1).half()

    def peak(factor: int) -> int:
        model = Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True))
        return allocated(poptorch.inferenceModel(model, options()), x, y)

    assert peak(2) > 1.2 * peak(8)


def test_sums_of_halves_keep_their_precision() -> None:
    # 2048 + 1 is no half, so that sums in half precision stay at 2048.
    lhs, rhs = torch.ones(1, 4096).half(), torch.ones(4096, 1).half()
    parts = {keep: infer(
        lambda x, y, k=keep: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 4096, k), lhs, rhs
    ).item() for keep in (False, True)}  # fmt: skip
    assert parts == {False: 2048.0, True: 4096.0}
