"""What is trained and what is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import infer, options, training


class Two(nn.Module):
    """Two layers; a function between them."""

    def __init__(self, between=lambda x: x) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        self.between = between

    def forward(self, x):
        out = self.second(self.between(self.first(x)))
        return out, poptorch.identity_loss(out.square(), "mean")


def stepped(model: nn.Module, eager: nn.Module | None = None, steps: int = 3):
    """Train with decay and momentum; return the executor and what the same loop gives eagerly."""
    eager = eager or copy.deepcopy(model)
    trained = [p for p in eager.parameters() if p.requires_grad]
    native = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, use_combined_accum=False
    )
    executor = poptorch.trainingModel(model, options(), optimizer)
    for step in range(steps):
        x = normal(4, 3, seed=step)
        executor(x)
        native.zero_grad()
        eager(x)[1].backward()
        native.step()
    return executor, eager


@torch.no_grad()
def without_recording(x):
    return x * 1


@pytest.mark.spec("supported_ops", 11)
@pytest.mark.parametrize("cut", [torch.Tensor.detach, without_recording])
def test_what_lies_before_a_detach_stays_bit_for_bit(cut) -> None:
    model = Two(cut)
    before = copy.deepcopy(model.first.state_dict())
    executor, eager = stepped(model)
    for name, value in before.items():
        assert torch.equal(model.first.state_dict()[name], value)
    torch.testing.assert_close(executor.model.second.weight, eager.second.weight)
    assert not torch.equal(model.second.weight, Two().second.weight)


@pytest.mark.spec("supported_ops", 12)
def test_what_needs_no_gradient_stays_bit_for_bit() -> None:
    model = Two()
    model.first.weight.requires_grad_(False)
    before = model.first.weight.detach().clone()
    _, eager = stepped(model)
    assert torch.equal(model.first.weight, before)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


@pytest.mark.spec("supported_ops", 13)
def test_inputs_that_want_a_gradient_give_one_warning(caplog) -> None:
    executor = training(Two())
    x = normal(4, 3).requires_grad_()
    with caplog.at_level("WARNING"):
        _, loss = executor(x)
        executor(x)
    texts = [r.getMessage() for r in caplog.records if "requires_grad" in r.getMessage()]
    assert len(texts) == 1
    assert x.grad is None
    torch.testing.assert_close(loss, Two()(x.detach())[1].detach())


@pytest.mark.spec("supported_ops", 14)
def test_results_and_parameters_have_no_gradients() -> None:
    executor = training(Two())
    out, loss = executor(normal(4, 3))
    assert not out.requires_grad
    assert not loss.requires_grad
    with pytest.raises(poptorch.Error, match="backward"):
        loss.backward()
    assert all(p.grad is None for p in executor.model.parameters())
    assert not infer(Two(), normal(4, 3))[0].requires_grad


@pytest.mark.spec("supported_ops", 15)
def test_tied_weights_are_updated_once_with_the_summed_gradient() -> None:
    model = Two()
    model.second.weight = model.first.weight
    _, eager = stepped(model)
    assert model.second.weight is model.first.weight
    assert {"first.weight", "second.weight"} <= set(model.state_dict())
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.ones_like(gradient) * 0.5 + 0 * x


def straight_through(x):
    return x + (x.round() - x).detach()


def proxied(x):
    return poptorch.custom_op([x.round(), x], "AutogradProxy", "test.graphcore", 1, [x])[0]


poptorch.register_custom_op(
    "AutogradProxy",
    "test.graphcore",
    1,
    lambda inputs, attributes: [inputs[0].clone()],
    lambda inputs, outputs, gradients, attributes: [None, gradients[0]],
)


@pytest.mark.spec("supported_ops", 21)
@pytest.mark.parametrize("between", [Clipped.apply, straight_through])
def test_gradients_of_ones_own_are_honoured(between) -> None:
    model, plain = Two(between), Two()
    stepped(plain)
    _, eager = stepped(model)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert not torch.allclose(model.first.weight, plain.first.weight)


@pytest.mark.spec("supported_ops", 21)
def test_an_operator_can_hand_the_gradient_to_another_tensor() -> None:
    model, same = Two(proxied), Two(straight_through)
    stepped(model)
    stepped(same)
    torch.testing.assert_close(model.first.state_dict(), same.first.state_dict())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_parametrizations_and_old_weight_norm_train_as_in_torch() -> None:
    class Positive(nn.Module):
        def forward(self, x):
            return x.exp()

    for change in (
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.first),
        lambda m: torch.nn.utils.parametrize.register_parametrization(
            m.second, "weight", Positive()),
        lambda m: torch.nn.utils.weight_norm(m.first),
    ):  # fmt: skip
        model, eager = Two(), Two()
        change(model)
        change(eager)
        stepped(model, eager)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_unused_parameters_are_left_alone() -> None:
    model = Two()
    model.unused = nn.Parameter(torch.ones(3))
    _, eager = stepped(model)
    assert torch.equal(model.unused, torch.ones(3))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
