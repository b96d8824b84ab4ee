"""Factors and offsets of channels are folded into the weights of the preceding product."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.folded import compiled
from helpers.wrapping import Having, normal, options
from poptorch._cpu import Inductor, product_libraries

Forward = Callable[..., Any]


def onednn(
    work: Iterable[product_libraries.Shape], measures: bool
) -> dict[product_libraries.Shape, str]:
    return dict.fromkeys(work, product_libraries.ONEDNN)


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: oneDNN computes all products."""
    monkeypatch.setattr(product_libraries, "chosen", onednn)


def product(function: Forward) -> Forward:
    """Return a function of a product with 6 columns."""
    return lambda m, x: function(m, m.layer(x))


def convolution(function: Forward) -> Forward:
    """Return a function of a convolution with 6 channels of 6 by 6."""
    return lambda m, x: function(m, m.conv(x.view(3, 2, 6, 6)))


def left_of(forward: Forward) -> list[str]:
    """Return which additions and multiplications are left in the graph of a call."""
    layers = {"layer": nn.Linear(6, 6), "conv": nn.Conv2d(2, 6, 1), "norm": nn.BatchNorm2d(6)}
    numbers = {
        "scale": normal(6),
        "shift": normal(6),
        "column": normal(36, 1),
        "cube": normal(1, 6, 6),
    }
    model = Having(forward, **layers, **numbers).eval()
    executor = poptorch.inferenceModel(model, options("reference"))
    executor.compile(normal(36, 6))
    operators = Inductor().prepared(executor.plan()).program.graphs["forward"].operators
    names = [node.target.__name__.partition(".")[0] for node in operators]
    return [name for name in names if name in ("mul", "add")]


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(product(lambda m, y: y * m.scale + m.shift), id="after a product"),
        pytest.param(product(lambda m, y: m.shift + m.scale * y), id="from the left"),
        pytest.param(
            convolution(lambda m, y: y * m.scale[:, None, None]), id="after a convolution"
        ),
        pytest.param(convolution(lambda m, y: m.norm(y)), id="norm"),
        pytest.param(lambda m, x: (x.view(36, 6) @ m.cube[0]) * m.scale, id="weight from a view"),
    ],
)
def test_one_number_for_each_channel_goes_into_the_weight(forward: Forward) -> None:
    assert left_of(forward) == []


@pytest.mark.parametrize(
    "forward, left",
    [
        pytest.param(product(lambda m, y: y * m.scale[:1]), ["mul"], id="one for all channels"),
        pytest.param(product(lambda m, y: y * m.column), ["mul"], id="one for each row"),
        pytest.param(product(lambda m, y: y * 2.0), ["mul"], id="a constant"),
        pytest.param(product(lambda m, y: y * y[0]), ["mul"], id="a computed value"),
        pytest.param(product(lambda m, y: y * m.cube[:, :1]), ["mul"], id="more dimensions"),
        pytest.param(product(lambda m, y: torch.add(y, m.shift, alpha=2)), ["add"], id="alpha"),
        pytest.param(convolution(lambda m, y: y * m.scale), ["mul"], id="along a row"),
        pytest.param(convolution(lambda m, y: y + m.shift[:, None]), ["add"], id="along a column"),
    ],
)
def test_other_scales_are_not_folded(forward: Forward, left: list[str]) -> None:
    assert left_of(forward) == left


@pytest.mark.parametrize(
    "forward, left",
    [
        pytest.param(product(lambda m, y: y.double() * m.scale), ["mul"], id="product"),
        pytest.param(
            product(lambda m, y: y + m.shift.half().float().double()), ["add"], id="number"
        ),
    ],
)
def test_numbers_in_other_types_than_float32_are_left(forward: Forward, left: list[str]) -> None:
    assert left_of(forward) == left


@pytest.mark.parametrize(
    "forward, left",
    [
        pytest.param(product(lambda m, y: (y * m.scale, y)), ["mul"], id="product"),
        pytest.param(convolution(lambda m, y: (m.norm(y), y)), ["mul", "add"], id="convolution"),
    ],
)
def test_a_product_that_something_else_reads_keeps_its_weight(
    forward: Forward, left: list[str]
) -> None:
    assert left_of(forward) == left


@pytest.mark.parametrize(
    "forward, left",
    [
        pytest.param(
            lambda m, x: (x.view(36, 6) @ x.view(36, 6)[:6]) * m.scale, ["mul"], id="no weight"
        ),
        pytest.param(
            lambda m, x: m.norm(x.view(3, 2, 6, 6)[:, :1].expand(3, 6, 6, 6)),
            ["mul", "add"],
            id="no product",
        ),
    ],
)
def test_without_a_known_weight_nothing_is_folded(forward: Forward, left: list[str]) -> None:
    assert left_of(forward) == left


@pytest.mark.slow
def test_a_product_that_is_returned_and_a_weight_that_is_drawn_from_are_right() -> None:
    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = model.layer(x)
        return model.norm(y), y, F.dropout(model.layer.weight, 0.5, training=True)

    model = Having(forward, layer=nn.Linear(4, 64), norm=nn.BatchNorm1d(64)).eval()
    model.norm.running_var.fill_(3)
    executor, x = compiled(model), normal(3, 4)

    first, second = executor(x), executor(x)

    torch.testing.assert_close(first[:2], model(x)[:2], **near(4 + FUNCTION))
    assert not torch.equal(first[2], second[2])
