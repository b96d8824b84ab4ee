"""Tensors that ``forward`` keeps outside of the model have values after a capture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.cases import slow_but_the_first
from helpers.wrapping import options
from poptorch._base import private

Positions = Callable[[int], torch.Tensor]


def positions(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length)[:, None].expand(length, 3)


def masks(length: int) -> torch.Tensor:
    mask = torch.zeros(length, 3)
    mask[1:, 0] = 1.0  # a write to a view
    return mask


def in_a_dict(function: Positions) -> Positions:
    kept: dict[int, torch.Tensor] = {}

    def cached(length: int) -> torch.Tensor:
        if length not in kept:
            kept[length] = function(length)
        return kept[length]

    return cached


class Shifted(nn.Module):
    def __init__(self, function: Positions) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x + self.function(x.shape[1]))
        return out, F.mse_loss(out, x)


class Deciding(Shifted):
    """Branches on values, and is therefore captured twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift = self.function(x.shape[1])
        if x.sum() > 1e6:
            shift = 2 * shift
        out = self.layer(x + shift)
        return out, F.mse_loss(out, x)


def train(model: nn.Module, rows: int = 4) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    return wrapped(torch.ones(rows, 5, 3))


@pytest.fixture(params=slow_but_the_first([functools.cache, in_a_dict]))
def cache(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("function", [positions, masks])
def test_a_cache_outside_of_the_model_gets_the_values_of_eager_pytorch(
    cache: Any, function: Positions
) -> None:
    cached = cache(function)

    train(Shifted(cached))

    assert type(cached(5)) is torch.Tensor
    assert cached(5).equal(function(5))


def test_a_second_model_is_compiled_with_what_the_first_one_left_in_a_cache(cache: Any) -> None:
    cached = cache(positions)
    train(Shifted(cached))
    second = Shifted(cached)
    expected = second(torch.ones(2, 5, 3))[1].item()

    _, loss = train(second)

    assert loss.item() == pytest.approx(expected)


def test_a_model_that_is_captured_twice_uses_the_cache_of_the_first_capture(cache: Any) -> None:
    cached = cache(positions)

    train(Deciding(cached))

    assert cached(5).equal(positions(5))


def test_a_capture_that_fails_leaves_values_in_the_cache(cache: Any) -> None:
    cached = cache(positions)

    with pytest.raises(RuntimeError, match="captured forward"):
        train(Shifted(lambda length: cached(length) + cached(length).new_ones(7, 7)))

    assert cached(5).equal(positions(5))


def test_a_tensor_that_depends_on_inputs_gets_no_made_up_values() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(Shifted):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept.append((x * 2).detach())
            return super().forward(x)

    train(Keeping(positions))

    assert type(kept[0]) is not torch.Tensor


@pytest.fixture
def _cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = private.optional

    def optional(name: str) -> Any:
        return None if name == "swap_tensor_impl" else usual(name)

    monkeypatch.setattr(private, "optional", optional)


@pytest.mark.usefixtures("_cannot_swap")
def test_a_cache_is_refused_if_torch_cannot_give_values_to_its_tensors(cache: Any) -> None:
    with pytest.raises(poptorch.Error, match="forward keeps a tensor outside of the model"):
        train(Shifted(cache(positions)))
