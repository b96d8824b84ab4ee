"""Tensors that are assigned to a wrapped model: ``model.weight = tensor``."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import inference, normal
from helpers.wrapping import Having, training

X, Y = normal(8, 2), normal(8, 2, seed=1)


def net() -> Having:
    """A weight and a buffer of its own, and one below."""

    def forward(model, x, y=None):
        out = model.below(x * model.weight + model.offset)
        return out if y is None else (out, nn.functional.mse_loss(out, y))

    weight = nn.Parameter(torch.ones(2))
    return Having(forward, weight=weight, offset=torch.zeros(2), below=nn.BatchNorm1d(2))


def assign(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.tensor([2.0, -3.0]))
    model.offset = torch.tensor([5.0, 6.0])
    model.below.bias = nn.Parameter(torch.tensor([0.5, -0.5]))
    model.below.running_mean = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("when", ["before compiling", "after compiling", "detached"])
def test_what_is_assigned_reaches_the_device(train: bool, when: str) -> None:
    model = net()
    executor = training(model, lr=0.5) if train else inference(model.eval())
    args = (X, Y) if train else (X,)
    if when != "before compiling":
        executor(*args)
    if when == "detached":
        executor.detachFromDevice()
    first, trained = model.weight, model.weight.detach().clone()
    if when == "after compiling":
        executor(*args)
    assign(model)  # what was trained until then is for the old tensor
    assert torch.equal(first, trained) != (train and when == "after compiling")
    eager = copy.deepcopy(model)
    if when == "after compiling":
        executor.copyWeightsToDevice()
    got, expected = executor(*args), eager(*args)
    if train:
        expected[1].backward()
        torch.testing.assert_close(got[1], expected[1].detach())
        torch.testing.assert_close(model.weight, eager.weight - 0.5 * eager.weight.grad)
    else:
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.below.running_mean, eager.below.running_mean)


def test_what_does_not_fit_is_refused_and_parameters_that_were_replaced_are_let_go() -> None:
    model = net()
    executor = training(model)
    executor(X, Y)
    kept = model.offset
    model.offset = torch.zeros(3)
    with pytest.raises(poptorch.Error, match=r"(?s)shape of 'offset'.*\(3,\); compiled: \(2,\)"):
        executor.copyWeightsToDevice()
    model.offset = kept
    model.register_buffer("another", torch.zeros(1))
    with pytest.raises(poptorch.Error, match=r"(?s)other parameters or buffers.*another"):
        executor.copyWeightsToDevice()
    del model.another
    executor.copyWeightsToDevice()
    expected = copy.deepcopy(model)(X, Y)[1].detach()
    assert torch.equal(executor(X, Y)[1], expected)
    others = {name: value.clone() for name, value in model.state_dict().items()}
    old = [weakref.ref(each) for each in model.parameters()]
    model.load_state_dict(others, assign=True)
    executor.copyWeightsToDevice()
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    executor(X, Y)
    gc.collect()
    assert [each() for each in old] == [None] * len(old)
