"""Maximum pooling by comparisons chooses the elements that ATen's loop chooses."""

import pytest
import torch

from helpers.closeness import near
from poptorch._cpu.pooling import max_pool, max_pool_backward

aten = torch.ops.aten
BATCH = 8
LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
GEOMETRIES = pytest.mark.parametrize(
    "kernel, stride, padding, dilation",
    [
        ([2, 2], [2, 2], [0, 0], [1, 1]),
        ([3, 2], [2, 1], [1, 0], [1, 1]),
        ([2], [], [1], [2]),
    ],
)


def images(layout: torch.memory_format) -> torch.Tensor:
    """Return images with many equal elements, and two that are not numbers."""
    x = torch.randint(-3, 3, (BATCH, 8, 8, 9)).float()
    x[0, 0, 3, 3:5] = float("nan")
    return x.contiguous(memory_format=layout)


@LAYOUTS
@GEOMETRIES
def test_the_same_elements_are_chosen_as_by_aten(
    layout: torch.memory_format,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> None:
    x, geometry = images(layout), (kernel, stride, padding, dilation)

    assert max_pool.applies(x, *geometry)
    ours = max_pool(x, *geometry)

    expected = aten.max_pool2d_with_indices(x, *geometry)
    torch.testing.assert_close(ours, expected, check_stride=False, equal_nan=True)


@LAYOUTS
@GEOMETRIES
def test_gradients_go_to_the_elements_that_aten_chooses(
    layout: torch.memory_format,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> None:
    x = images(layout)
    best, index = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation)
    grad = torch.randn_like(best)
    arguments = (grad, x, kernel, stride or kernel, padding, dilation, False, index)

    assert max_pool_backward.applies(*arguments)
    ours = max_pool_backward(*arguments)

    expected = aten.max_pool2d_with_indices_backward(*arguments)
    torch.testing.assert_close(ours, expected, **near(BATCH * 9 * 8), check_stride=False)


@pytest.mark.parametrize("size, applies", [(5, False), (4, True)])
def test_windows_that_reach_over_the_end_are_left_to_aten(size: int, applies: bool) -> None:
    x = torch.randn(BATCH, 1, size, size)
    assert max_pool.applies(x, [2, 2], [2, 2], [0, 0], [1, 1], True) == applies


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(7, 3, 4, 4), id="few rows"),
        pytest.param(torch.randn(BATCH, 4, 4), id="one image"),
        pytest.param(torch.ones(BATCH, 1, 4, 4, dtype=torch.int64), id="integers"),
    ],
)
def test_sizes_that_do_not_fill_vectors_are_left_to_aten(x: torch.Tensor) -> None:
    assert not max_pool.applies(x, [2, 2], [2, 2], [0, 0], [1, 1])
