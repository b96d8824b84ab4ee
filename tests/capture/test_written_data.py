"""What ``forward`` writes through ``.data`` and with ``backward()`` counts as in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, training, trains_alike

X, Y = normal(8, 4), normal(8, 3, seed=1)


def model(function: Callable[..., Any]) -> Having:
    torch.manual_seed(3)
    return Having(
        lambda m, x, y: nn.functional.mse_loss(function(m, x, y), y),
        layer=nn.Linear(4, 3),
        state=torch.zeros(3),
        other=torch.ones(3),
    )


def a_weight_is_assigned(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data = m.layer.weight.data * 0.9
    return m.layer(x)


def a_weight_is_clamped_at_the_end(m: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = m.layer(x)
    m.layer.weight.data = m.layer.weight.data.clamp(-0.2, 0.2)
    return out


def a_weight_is_binary_for_a_while(m: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
    kept = m.layer.weight.data.clone()
    m.layer.weight.data = m.layer.weight.data.sign() * 0.3
    out = m.layer(x)
    m.layer.weight.data = kept
    return out


def a_weight_has_another_type_for_a_while(
    m: Having, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    kept = m.layer.weight.data
    m.layer.weight.data = kept.bfloat16()
    rounded = m.layer.weight.detach().float().sum()
    m.layer.weight.data = kept
    return m.layer(x) * rounded


def a_buffer_is_assigned(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.state.data = m.state.data * 0.5 + x.mean()
    return m.layer(x) + m.state


def a_buffer_gets_a_constant(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.state.data = torch.full((3,), 2.0)
    m.state.add_(1)
    return m.layer(x) + m.state


def data_is_written_in_place(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data.mul_(0.9)
    m.state.data[0] = 5.0
    return m.layer(x) + m.state


def a_buffer_shares_memory_with_what_it_got(
    m: Having, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    value = x.mean(0)[:3] * 1
    m.state.data = value
    value.add_(1)
    return m.layer(x) + m.state


def two_buffers_change_places(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.state.data, m.other.data = m.other.data, m.state.data
    m.state.add_(1)
    return m.layer(x) + m.state - m.other


def a_vector_becomes_weights(m: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
    vector = nn.utils.parameters_to_vector(m.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.95, m.parameters())
    return m.layer(x)


def an_adversarial_example_leaves_gradients(m: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
    moved = x.detach().clone().requires_grad_(True)
    nn.functional.mse_loss(m.layer(moved), y).backward()
    return m.layer(x + 0.1 * moved.grad.sign())


def an_adversarial_example_asks_for_one_gradient(
    m: Having, x: torch.Tensor, y: torch.Tensor
) -> Any:
    moved = x.detach().clone().requires_grad_(True)
    nn.functional.mse_loss(m.layer(moved), y).backward(inputs=[moved])
    return m.layer(x + 0.1 * moved.grad.sign())


ALIKE = [
    a_weight_is_assigned,
    a_weight_is_clamped_at_the_end,
    a_weight_is_binary_for_a_while,
    a_weight_has_another_type_for_a_while,
    a_buffer_is_assigned,
    a_buffer_gets_a_constant,
    data_is_written_in_place,
    a_buffer_shares_memory_with_what_it_got,
    two_buffers_change_places,
    a_vector_becomes_weights,
    an_adversarial_example_leaves_gradients,
    an_adversarial_example_asks_for_one_gradient,
]


@pytest.mark.parametrize("function", ALIKE, ids=lambda function: function.__name__)
def test_models_that_write_to_data_train_like_eager_torch(function: Callable[..., Any]) -> None:
    trains_alike(model(function), X, Y, eager=model(function), accumulation=2)


def another_shape_is_left(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.state.data = torch.zeros(1)
    return m.layer(x) + m.state


def a_constant_is_assigned(m: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
    m.held[0].data = x.data
    return m.layer(x)


def one_of_two_buffers_in_one_memory_is_written(
    m: Having, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    m.state.add_(1)
    return m.layer(x) + m.part.sum()


def a_view_from_outside_does_not_follow(
    m: Having, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    m.state.add_(1)
    return m.layer(x) + m.held[1].sum()


REFUSED = [
    (another_shape_is_left, "'state' was float32.3. and is now float32.1."),
    (a_constant_is_assigned, "is a constant of the program"),
    (one_of_two_buffers_in_one_memory_is_written, "'state' and 'part'"),
    (a_view_from_outside_does_not_follow, "shares memory with 'state'"),
]


@pytest.mark.parametrize("function, message", REFUSED)
def test_a_write_to_data_that_cannot_be_followed_is_refused(
    function: Callable[..., Any], message: str
) -> None:
    made = model(function)
    made.held = [torch.zeros(8, 4), made.state[:2]]
    if function is one_of_two_buffers_in_one_memory_is_written:
        made.register_buffer("part", made.state[:2])
    with pytest.raises(poptorch.Error, match=rf"(?s){message}.*Where:.*Fix:"):
        training(made)(X, Y)
