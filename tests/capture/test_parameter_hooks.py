"""Hooks on parameters change the gradients that a program takes, as they do in torch."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

MASK = torch.tensor([1.0, 0.0, 2.0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


HOOKS = {
    "zero": lambda gradient: gradient * 0,
    "masked": lambda gradient: gradient * MASK,
    "clipped in place": lambda gradient: gradient.clamp_(-0.05, 0.05),
    "only looks": lambda gradient: None,
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_sees_the_gradient_of_each_micro_batch(name: str, accumulation: int) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    for net in (model, twin):
        net.layer.weight.register_hook(HOOKS[name])
    x, y = torch.randn(4 * accumulation, 3), torch.randn(4 * accumulation, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, options(accumulation=accumulation), optimizer)(x, y)
    # The mean over micro-batches is taken of what the hooks return.
    for rows, labels in zip(x.split(4), y.split(4), strict=True):
        twin(rows, labels).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        expected = theirs.detach() - 0.1 * theirs.grad / accumulation
        torch.testing.assert_close(ours.detach(), expected)


def test_a_hook_after_accumulation_is_refused_and_inference_has_none() -> None:
    model = Net()
    handle = model.layer.weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    torch.testing.assert_close(
        poptorch.inferenceModel(model, options())(x, y), model(x, y).detach()
    )
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="after a gradient was accumulated") as refused:
        executor(x, y)
    assert "'layer.weight'" in str(refused.value)
    handle.remove()
    assert executor(x, y) > 0
