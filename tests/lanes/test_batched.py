"""Operators that have a rule for several micro-batches run once for all of them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.eager_loop import ROWS, Eager, Setup, wrapped
from helpers.wrapping import Having, graph_of, normal

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LENGTH, HEADS, WIDTH = 3, 2, 4
CONSTANT = normal(ROWS, 1, LENGTH, LENGTH)
TRAINED = Setup(accumulation=4)
INFERRED = Setup(training=False, iterations=4)

Mask = Callable[[torch.Tensor], torch.Tensor | None]


def similarities(x: torch.Tensor) -> torch.Tensor:
    """Compute a matrix for each sample."""
    return (x @ x.transpose(1, 2)).detach()


MASKS: dict[str, Mask] = {
    "no mask": lambda x: None,
    "a constant matrix": lambda x: CONSTANT[0, 0],
    "a constant with two dimensions of size 1": lambda x: CONSTANT[:1],
    "a matrix of the micro-batch": lambda x: similarities(x)[0],
    "the micro-batch's, with two dimensions of size 1": lambda x: similarities(x)[:1, None],
    "a matrix of each sample": lambda x: similarities(x)[:, None],
    "a matrix of each sample and head": lambda x: similarities(x)[:, None].repeat(1, HEADS, 1, 1),
}
"""Functions of a micro-batch that return what attention adds to its scores."""


def attending(mask: Mask) -> Callable[[], nn.Module]:
    """Return a function that makes a model with one attention, always with the same weights."""

    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = m.layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads, mask(x))
        return out, poptorch.identity_loss(out.square(), "mean") if m.training else out.mean()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Having(forward, layer=nn.Linear(WIDTH, WIDTH))

    return make


@pytest.mark.parametrize("setup", [TRAINED, INFERRED], ids=["training", "inference"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_with_any_mask_is_that_of_eager_pytorch_in_lanes(
    mask: Mask, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why there are no lanes, if there are none."""
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    make = attending(mask)
    eager = Eager(make, lambda results: results[1], setup)
    batch = normal(setup.rows, LENGTH, WIDTH, seed=1)

    with wrapped(make, setup) as ours:
        got, trained = ours(batch), ours.state()
        lanes = ours.wrapper.plan().program.lanes

    close = near(300, 2, size=4)
    assert lanes is not None
    torch.testing.assert_close(got, eager(batch), **close)
    torch.testing.assert_close(trained, eager.state(), **close)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_of_all_lanes_is_one_operator_whatever_its_mask(mask: Mask) -> None:
    with wrapped(attending(mask), INFERRED) as ours:
        ours(normal(INFERRED.rows, LENGTH, WIDTH))
        operators = [node.target for node in graph_of(ours.wrapper).nodes]

    assert operators.count(ATTENTION) == 1


def test_a_constant_mask_for_each_sample_prevents_batching_of_micro_batches() -> None:
    """The mask has the rows of one micro-batch, and not those of all."""
    make = attending(lambda x: CONSTANT)
    eager = Eager(make, lambda results: results[1], TRAINED)
    batch = normal(TRAINED.rows, LENGTH, WIDTH, seed=1)

    with wrapped(make, TRAINED) as ours:
        got, trained = ours(batch), ours.state()
        lanes = ours.wrapper.plan().program.lanes

    close = near(300, 2, size=4)
    assert lanes is None
    torch.testing.assert_close(got, eager(batch), **close)
    torch.testing.assert_close(trained, eager.state(), **close)
