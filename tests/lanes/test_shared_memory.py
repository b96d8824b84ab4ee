"""Weights that share memory with other tensors of their model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options, trains_alike

WIDTH = 6

Change = Callable[[Having, torch.Tensor], Any]


def two_layers(change: Change) -> Having:
    """Return a model of two layers after a change, which gets it and the first layer's weight."""

    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, poptorch.identity_loss(m.second(m.first(x).tanh()).square().mean())

    torch.manual_seed(0)
    first, second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = Having(forward, first=first, second=second, kept=torch.ones(WIDTH))
    change(model, model.first.weight.data)
    return model


def in_one_memory(m: Having, weight: torch.Tensor) -> None:
    """Let the second layer have the first one's weight, as another parameter."""
    m.second.weight.data = weight


def test_weights_in_one_memory_stay_equal_in_training() -> None:
    model = two_layers(in_one_memory)
    before = model.first.weight.detach().clone()

    poptorch.trainingModel(model, options())(torch.randn(8, WIDTH))

    assert torch.equal(model.second.weight, model.first.weight)
    assert not torch.equal(model.first.weight, before)


def test_an_edit_of_weights_in_one_memory_reaches_both() -> None:
    model, x = two_layers(in_one_memory), torch.randn(8, WIDTH)
    training = poptorch.trainingModel(model, options())
    training(x)

    model.second.weight.detach().mul_(0.5)
    training.copyWeightsToDevice()

    expected = copy.deepcopy(model)(x)[1].detach()
    torch.testing.assert_close(training(x)[1], expected)


OVERLAPPING: dict[str, Change] = {
    "a part": lambda m, weight: setattr(m.second.bias, "data", weight[0]),
    "transposed": lambda m, weight: setattr(m.second.weight, "data", weight.t()),
    "a buffer": lambda m, weight: setattr(m, "kept", weight[1]),
    "frozen": lambda m, weight: (in_one_memory(m, weight), m.second.weight.requires_grad_(False)),
}


@pytest.mark.parametrize("change", OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_tensor_that_would_not_follow_a_trained_weight_in_its_memory_is_refused(
    change: Change,
) -> None:
    model = two_layers(change)

    with pytest.raises(poptorch.Error, match="shares memory with another tensor"):
        poptorch.trainingModel(model, options())(torch.randn(8, WIDTH))


def test_stages_on_one_chip_train_weights_that_share_memory() -> None:
    x = torch.randn(8, WIDTH)
    alone, staged = two_layers(in_one_memory), two_layers(in_one_memory)

    poptorch.trainingModel(alone, options())(x)
    poptorch.trainingModel(staged, options("staged"))(x)

    torch.testing.assert_close(staged.state_dict(), alone.state_dict())


def test_weights_in_one_memory_cannot_be_trained_on_several_chips() -> None:
    model = two_layers(in_one_memory)
    model.first = poptorch.BeginBlock(model.first, ipu_id=0)
    model.second = poptorch.BeginBlock(model.second, ipu_id=1)
    opts = options("staged").setExecutionStrategy(poptorch.ShardedExecution())

    with pytest.raises(poptorch.Error, match="cannot be trained on several chips"):
        poptorch.trainingModel(model, opts)(torch.randn(8, WIDTH))


def test_weights_that_are_separate_parts_of_one_memory_are_trained_as_usual() -> None:
    """They are columns of one tensor and have no element in common."""

    def columns(m: Having, weight: torch.Tensor) -> None:
        both = torch.cat([m.first.weight.detach(), m.second.weight.detach()], 1)
        m.first.weight.data, m.second.weight.data = both[:, :WIDTH], both[:, WIDTH:]

    trains_alike(
        two_layers(columns), torch.randn(8, WIDTH), eager=two_layers(lambda m, weight: None)
    )
