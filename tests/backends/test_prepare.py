"""The last step before code: graphs take tensors of other strides than they were traced with."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import normal, options
from poptorch.backends.prepare import ACCEPTING, accept_strides

aten = torch.ops.aten


@pytest.fixture
def flattening() -> fx.GraphModule:
    """Return a graph whose view makes one dimension of two."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.view.default, (x, [6])))
    return accept_strides(fx.GraphModule({}, graph))


def test_a_view_of_the_usual_strides_shares_memory(flattening: fx.GraphModule) -> None:
    rows = torch.arange(6.0).reshape(2, 3)

    flat = flattening(rows)

    assert torch.equal(flat, rows.reshape(6))
    assert flat.data_ptr() == rows.data_ptr()


def test_a_view_of_other_strides_is_one_of_a_copy(flattening: fx.GraphModule) -> None:
    columns = torch.arange(6.0).reshape(2, 3).t()  # no view of it has one dimension

    assert torch.equal(flattening(columns), columns.reshape(6))


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def batch_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


IMAGES, GRADIENTS, WEIGHT = normal(2, 4, 5, 5), normal(2, 4, 5, 5), normal(4)
_, MEAN, RSTD = aten.native_group_norm(IMAGES, WEIGHT, WEIGHT, 2, 4, 25, 2, 1e-5)
ATTENDED, SUMS = aten._scaled_dot_product_flash_attention_for_cpu(IMAGES, IMAGES, IMAGES)
# An operator, its operands, and the operands that may have any strides.
KERNELS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "group norm": (
        aten.native_group_norm.default,
        (IMAGES, WEIGHT, WEIGHT, 2, 4, 25, 2, 1e-5),
        (0,),
    ),
    "gradients of group norm": (
        aten.native_group_norm_backward.default,
        (GRADIENTS, IMAGES, MEAN, RSTD, WEIGHT, 2, 4, 25, 2, [True] * 3),
        (0, 1),
    ),
    "gradients of attention": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (GRADIENTS, IMAGES, IMAGES, IMAGES, ATTENDED, SUMS, 0.0, False),
        (0, 1, 2, 3, 4),
    ),
    "gradients of a loss of each pixel": (
        aten.nll_loss2d_backward.default,
        (torch.tensor(1.0), IMAGES, torch.ones(2, 5, 5).long(), None, 1, -100, torch.tensor(50.0)),
        (1,),
    ),
}


@pytest.mark.parametrize("layout", [channels_last, batch_last])
@pytest.mark.parametrize("name", KERNELS)
def test_an_operator_accepts_any_strides_of_one_or_two_operands(
    name: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    operator, operands, places = KERNELS[name]
    expected = operator(*operands)

    for pair in itertools.combinations_with_replacement(places, 2):
        given = [layout(each) if at in pair else each for at, each in enumerate(operands)]
        torch.testing.assert_close(ACCEPTING[operator](*given), expected)


class Normed(nn.Module):
    """A group norm of images in channels_last. The gradient of its loss is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result = self.norm(self.convolution(channels_last(images)))
        return F.mse_loss(result, torch.zeros_like(result))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("backend", ["reference", pytest.param("optimise", marks=pytest.mark.slow)])
def test_gradients_of_a_group_norm_in_channels_last_are_those_of_eager(
    backend: str, accumulation: int
) -> None:
    eager, model = Normed(), Normed()
    opts = options(accumulation=accumulation).backend(backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [each.detach().clone() for each in eager.parameters()]
    batch = normal(2 * accumulation, 3, 7, 7)

    poptorch.trainingModel(model, opts, optimizer)(batch)
    for images in batch.chunk(accumulation):
        (eager(images) / accumulation).backward()

    for start, own, theirs in zip(before, model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(start - own, theirs.grad, **near(FUNCTION + 150))
