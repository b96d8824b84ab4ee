"""User code that runs during the backward pass sees the program's state, and changes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, training, trains_alike

X = normal(4, 3)


def model_of(forward: Callable[..., Any]) -> Having:
    torch.manual_seed(0)
    return Having(forward, layer=nn.Linear(3, 3), seen=torch.zeros(3), count=torch.zeros(()))


def marked(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, poptorch.identity_loss(out.square(), "mean")


def in_place(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        model.seen.add_(gradient.sum(0))
        model.count.add_(1)
        return gradient * (1 + model.count)

    out = model.layer(x)
    out.register_hook(hook)
    return marked(out)


def assigned(model: Having, x: torch.Tensor) -> Any:
    def hook(gradient: torch.Tensor) -> Any:
        model.seen = model.seen * 0.5 + gradient.sum(0)
        return gradient + model.seen

    out = model.layer(x)
    out.register_hook(hook)
    return marked(out)


def in_a_function(model: Having, x: torch.Tensor) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            model.count.add_(1)
            return gradient * 2 + model.count * model.layer.bias

    return marked(Scaled.apply(model.layer(x)))


def in_an_unpack_hook(model: Having, x: torch.Tensor) -> Any:
    def unpack(value: Any) -> Any:
        model.count.add_(1)
        return value * (1 + 0.1 * model.count)

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), unpack):
        out = model.layer(x).tanh()
    return marked(out)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("forward", [in_place, assigned, in_a_function, in_an_unpack_hook])
def test_the_backward_pass_reads_and_writes_the_programs_buffers(
    forward: Callable[..., Any], accumulation: int
) -> None:
    trains_alike(model_of(forward), X, accumulation=accumulation, steps=3)


def plain(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return marked(model.layer(x))


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_on_the_node_that_accumulates_is_refused(register: str) -> None:
    model = model_of(plain)
    node = torch.autograd.graph.get_gradient_edge(model.layer.weight).node
    handle = getattr(node, register)(lambda *gradients: None)
    executor = training(model)

    with pytest.raises(poptorch.Error, match="node that accumulates") as refused:
        executor(X)
    handle.remove()

    assert "'layer.weight'" in refused.value.message
    assert executor(X)[1] > 0


def test_a_hook_on_several_parameters_is_refused() -> None:
    model = model_of(plain)
    handle = torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda g: None)
    executor = training(model)

    with pytest.raises(poptorch.Error, match="several parameters") as refused:
        executor(X)
    handle.remove()

    assert "parameter.register_hook" in refused.value.message
    assert executor(X)[1] > 0
