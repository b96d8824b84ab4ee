"""``dynamic_slice`` and ``dynamic_update``."""

from __future__ import annotations

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Scaled, options, training


def executor(forward):
    return poptorch.inferenceModel(Calling(forward), options())


X = torch.arange(24.0).view(4, 6)


@pytest.mark.spec("ops", 12)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_start_is_read_at_run_time(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # An input of no dimensions cannot be cut into micro-batches, but one call needs none.
    model = executor(lambda x, start: poptorch.dynamic_slice(x, 1, start, 3, 2))
    for start in (2, 0, 3):
        at = torch.full(shape, start, dtype=dtype)
        assert torch.equal(model(X, at), X[:, start : start + 3 : 2])
        assert torch.equal(poptorch.dynamic_slice(X, 1, at, 3, 2), X[:, start : start + 3 : 2])


def test_a_window_goes_on_at_the_beginning() -> None:
    model = executor(lambda x, start: poptorch.dynamic_slice(x, -1, start, 4, 1))
    assert torch.equal(model(X, torch.tensor([4])), X[:, [4, 5, 0, 1]])
    assert torch.equal(poptorch.dynamic_slice(X, 1, torch.tensor(7), 1, 1), X[:, 1:2])


@pytest.mark.spec("ops", 12, 13)
def test_update_replaces_a_window_in_a_copy() -> None:
    def forward(x, src, start):
        return poptorch.dynamic_update(x, src, 0, start, 2), x

    model = executor(forward)
    src = torch.full((2, 6), -1.0)
    for start in (1, 2, 0):
        new, old = model(X, src, torch.tensor(start))
        expected = X.clone()
        expected[start : start + 2] = -1
        assert torch.equal(new, expected)
        assert torch.equal(old, X)
    wrapped, _ = model(X, src, torch.tensor(3))
    assert torch.equal(wrapped[[3, 0]], src)
    assert torch.equal(wrapped[1:3], X[1:3])


def test_gradients_flow_in_training() -> None:
    def forward(x, start):
        window = poptorch.dynamic_slice(x, 0, start, 2, 1)
        return poptorch.dynamic_update(x, window * 3, 0, start, 2)

    x, start = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1])
    module = Scaled(forward)
    weight = module.weight.detach().clone().requires_grad_()
    loss = forward(weight * x, start).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    model = training(module)
    _, got = model(x, start)
    torch.testing.assert_close(got, loss.detach())
    torch.testing.assert_close(model.model.weight.detach(), 2.0 - 0.1 * gradient)


@pytest.mark.parametrize(
    "arguments, phrase",
    [
        (([1], 0, torch.tensor(0), 1, 1), r"dynamic_slice must take a torch\.tensor input"),
        ((X, 0, 0, 1, 1), r"Slice start argument to dynamic_slice must be a torch\.tensor"),
        ((X, 0.0, torch.tensor(0), 1, 1), "dim must be an integer"),
        ((X, 0, torch.tensor(0), 1.0, 1), "size must be an integer"),
        ((X, 0, torch.tensor(0), 1, True), "step must be an integer"),
        ((X, 0, torch.tensor(0), 0, 1), "The start and end of a slice must be different"),
        ((X, 0, torch.tensor(0), -1, 1), "end less than the start"),
        ((X, 0, torch.tensor(0), 1, 0), "Slicing step must be at least 1"),
        ((X, 0, torch.tensor(0.0), 1, 1), "must be one integer"),
        ((X, 0, torch.tensor([0, 1]), 1, 1), "must be one integer"),
        ((X, 2, torch.tensor(0), 1, 1), "out of range"),
        ((X, 0, torch.tensor(0), 5, 1), "cannot be longer"),
    ],
)
def test_slice_arguments_are_checked(arguments: tuple, phrase: str) -> None:
    with pytest.raises(poptorch.Error, match=phrase):
        poptorch.dynamic_slice(*arguments)


@pytest.mark.parametrize(
    "arguments, phrase",
    [
        ((X, X[0], 0, torch.tensor(0), 1), "must have same dimensionality"),
        ((X, X[:1].double(), 0, torch.tensor(0), 1), "must have same dtype"),
        ((X, X[:1], 0, 0, 1), r"must be a torch\.tensor"),
        ((X, X[:1], 0, torch.tensor(0), 0), "must be different"),
        ((X, X[:1], 0, torch.tensor(0), 2), "does not fit"),
    ],
)
@pytest.mark.spec("ops", 13)
def test_update_arguments_are_checked(arguments: tuple, phrase: str) -> None:
    with pytest.raises(poptorch.Error, match=phrase):
        poptorch.dynamic_update(*arguments)
