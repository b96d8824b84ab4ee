"""``dynamic_slice`` and ``dynamic_update`` read where they start at run time."""

from collections.abc import Callable

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Scaled, options, trains_alike

X = torch.arange(24.0).view(4, 6)
TWICE = torch.cat([X, X], 1)


def every_second_of_three(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Slice columns with a step."""
    return poptorch.dynamic_slice(x, 1, start, 3, 2)


def window_of_four(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Slice columns, counted from the last dimension."""
    return poptorch.dynamic_slice(x, -1, start, 4, 1)


def two_rows_replaced(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Write -1 to two rows."""
    return poptorch.dynamic_update(x, torch.full((2, 6), -1.0), 0, start, 2)


def with_two_rows_replaced(start: int) -> torch.Tensor:
    """Return what ``two_rows_replaced`` should: after the last row comes the first."""
    updated = X.clone()
    updated[[start % 4, (start + 1) % 4]] = -1
    return updated


@pytest.mark.spec("ops", 12, 13)
@pytest.mark.parametrize("start", [2, 4])
@pytest.mark.parametrize("dtype, shape", [(torch.int16, (1,)), (torch.int64, ())])
@pytest.mark.parametrize(
    "function, expected",
    [
        (every_second_of_three, lambda start: TWICE[:, start : start + 3 : 2]),
        (window_of_four, lambda start: TWICE[:, start : start + 4]),
        (two_rows_replaced, with_two_rows_replaced),
    ],
)
def test_the_start_of_a_slice_is_read_at_run_time(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    expected: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
) -> None:
    """A window goes on at the beginning.

    An input of no dimensions cannot be cut into micro-batches, but one call needs none.
    """
    model = poptorch.inferenceModel(Calling(function), options())
    model.compile(X, torch.zeros(shape, dtype=dtype))
    at = torch.full(shape, start, dtype=dtype)

    torch.testing.assert_close(model(X, at), expected(start), rtol=0, atol=0)
    torch.testing.assert_close(function(X, at), expected(start), rtol=0, atol=0)


@pytest.mark.spec("ops", 12, 13)
def test_an_update_is_in_a_copy() -> None:
    model = poptorch.inferenceModel(Calling(lambda x, at: (two_rows_replaced(x, at), x)), options())
    start = torch.tensor([2])

    updated, same = model(X, start)

    assert torch.equal(same, X)
    assert torch.equal(updated, with_two_rows_replaced(2))
    assert torch.equal(two_rows_replaced(X, start), updated)
    assert torch.equal(X, torch.arange(24.0).view(4, 6))


def test_gradients_flow_through_slices_and_updates() -> None:
    def tripled_from(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        window = poptorch.dynamic_slice(x, 0, start, 2, 1) * 3
        return poptorch.dynamic_update(x, window, 0, start, 2)

    trains_alike(
        Scaled(tripled_from), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1]), lr=0.001
    )
