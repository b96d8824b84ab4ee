"""Gradients that ``forward`` of an inference model computes, such as forces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, inference, normal

X = normal(4, 3)


def energy(model: Having, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.first(x).tanh()).sum()


def model_of(forward: Callable[..., Any]) -> Having:
    torch.manual_seed(0)
    return Having(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 1))


def forces(model: Having, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return -torch.autograd.grad(energy(model, x), x)[0]


def by_keyword(model: Having, x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(outputs=energy(model, x), inputs=x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return second


def by_a_method(model: Having, x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    energy(model, x).backward()
    return x.grad


def by_a_function(model: Having, x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    torch.autograd.backward(energy(model, x))
    return x.grad


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("forward", [forces, by_keyword, by_a_method, by_a_function])
def test_inference_computes_gradients_as_eager_torch_does(
    forward: Callable[..., Any], iterations: int
) -> None:
    model = model_of(forward)

    got = inference(model, iterations=iterations)(X)

    torch.testing.assert_close(got, model(X).detach())


def test_the_gradient_of_a_weight_is_a_result_of_inference() -> None:
    model = model_of(lambda m, x: torch.autograd.grad(energy(m, x), m.first.weight)[0])

    got = inference(model)(X)

    torch.testing.assert_close(got, model(X).detach())


def test_a_model_that_computes_gradients_is_explained() -> None:
    executor = inference(model_of(forces))

    assert executor.explain(X).fatal == []


def test_a_tensor_in_another_order_is_viewed_as_on_an_ipu() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        turned = x.t()
        return turned.view(-1), turned.view(size=(2, 6)), turned.view_as(torch.zeros(12))

    flat, rows, like = inference(forward)(X)

    assert torch.equal(flat, X.t().reshape(-1))
    assert torch.equal(rows, X.t().reshape(2, 6))
    assert torch.equal(like, X.t().reshape(-1))


def test_a_view_of_another_type_keeps_the_bits() -> None:
    got = inference(lambda x: x.view(torch.int32))(X)

    assert torch.equal(got, X.view(torch.int32))


class Classifier(nn.Module):
    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 3), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return out, self.loss(out, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, target",
    [
        (nn.functional.mse_loss, normal(4, 3, seed=1)),
        (nn.functional.cross_entropy, torch.tensor([0, 2, 1, 0])),
    ],
)
def test_the_loss_of_an_exported_module_is_found(
    loss: Callable[..., Any], target: torch.Tensor
) -> None:
    model = Classifier(loss)
    _, expected = model(X, target)
    exported = torch.export.export(model, (X, target)).module()
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.1)
    executor = poptorch.trainingModel(exported, poptorch.Options().backend("reference"), optimizer)

    _, got = executor(X, target)

    torch.testing.assert_close(got, expected.detach())
