"""Group norms of values with the batch innermost are computed over whole vectors of the batch."""

import math

import pytest
import torch

from helpers.closeness import near
from poptorch._cpu.lowering import memory_order
from poptorch._cpu.norms import group_norm, group_norm_backward
from poptorch._cpu.windows import batch_first

aten = torch.ops.aten
BATCH, CHANNELS = 8, 6
LONGEST_SUM = BATCH * 9 * 8

SHAPES = pytest.mark.parametrize("groups, space", [(1, ()), (2, ()), (2, (3, 4)), (6, (7,))])
AFFINE = pytest.mark.parametrize("affine", [True, False])


def same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, **near(LONGEST_SUM), check_stride=False)


def weights(affine: bool) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    return (torch.randn(CHANNELS), torch.randn(CHANNELS)) if affine else (None, None)


@SHAPES
@AFFINE
def test_group_norm_equals_torchs_and_keeps_the_batch_innermost(
    groups: int, affine: bool, space: tuple[int, ...]
) -> None:
    x = batch_first(torch.randn(CHANNELS, *space, BATCH) + 3)
    arguments = (*weights(affine), BATCH, CHANNELS, math.prod(space), groups, 1e-5)

    assert group_norm.applies(x, *arguments)
    ours = group_norm(x, *arguments)

    same(ours, aten.native_group_norm(x.contiguous(), *arguments))
    assert memory_order(ours[0]) == memory_order(x)


@SHAPES
@AFFINE
@pytest.mark.parametrize("of_x", [True, False])
def test_gradients_equal_torchs_and_only_wanted_ones_are_computed(
    groups: int, affine: bool, space: tuple[int, ...], of_x: bool
) -> None:
    x = batch_first(torch.randn(CHANNELS, *space, BATCH) + 3)
    weight, bias = weights(affine)
    sizes = (BATCH, CHANNELS, math.prod(space), groups)
    _, mean, rstd = aten.native_group_norm(x.contiguous(), weight, bias, *sizes, 1e-5)
    grad, reference = torch.randn(x.shape), [of_x, affine, affine]
    rest = (mean, rstd, weight, *sizes, reference)

    assert group_norm_backward.applies(grad, x, *rest)
    found = group_norm_backward(grad, x, *rest)

    expected = aten.native_group_norm_backward(grad, x.contiguous(), *rest)
    for own, other, needed in zip(found, expected, reference, strict=True):
        assert (own is not None) == needed
        if needed:
            same(own, other)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(BATCH, CHANNELS, 5), id="batch outermost"),
        # torch adds up in float32
        pytest.param(batch_first(torch.randn(CHANNELS, 5, BATCH)).bfloat16(), id="bfloat16"),
        pytest.param(batch_first(torch.randn(CHANNELS, 5, 2)), id="few rows"),
    ],
)
def test_sizes_that_do_not_fill_vectors_of_float32_are_left_to_torch(x: torch.Tensor) -> None:
    assert not group_norm.applies(x, None, None, len(x), CHANNELS, 5, 2, 1e-5)
