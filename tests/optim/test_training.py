"""Optimizers on a wrapped model: what a call does to the weights, and what setOptimizer changes."""

import copy

import pytest
import torch

import poptorch


class Product(torch.nn.Module):
    """Its loss has the input's mean as the gradient of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.other = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return poptorch.identity_loss((self.weight * x + 0 * self.other).mean(), "none")


def wrapped(optimizer=None, iterations=1, accumulation=1):
    model = Product()
    options = poptorch.Options()
    options.deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    options.showCompilationProgressBar(False)
    made = optimizer(model) if optimizer else None
    return model, made, poptorch.trainingModel(model, options, made)


@pytest.mark.spec("optimizers", 4)
def test_the_default_optimizer():
    model, _, training = wrapped()
    training(torch.ones(1))
    assert float(model.weight.detach()) == pytest.approx(-0.01)
    training(torch.ones(1))
    assert float(model.weight.detach()) == pytest.approx(-0.02)


@pytest.mark.spec("optimizers", 22)
@pytest.mark.parametrize("iterations, accumulation", [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_one_update_per_device_iteration(iterations, accumulation):
    model, _, training = wrapped(
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0), iterations, accumulation
    )
    training(torch.ones(iterations * accumulation))
    assert float(model.weight.detach()) == -iterations


@pytest.mark.spec("optimizers", 1, 2)
def test_the_rate_counts_when_the_optimizer_is_set():
    model, optimizer, training = wrapped(lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
    first = training(torch.ones(1))
    compiled = training._session.now.compiled
    assert torch.equal(training(torch.ones(1)), first)
    assert float(model.weight.detach()) == 0.0
    optimizer.param_groups[0]["lr"] = 0.5
    training(torch.ones(1))
    assert float(model.weight.detach()) == 0.0
    training.setOptimizer(optimizer)
    training(torch.ones(1))
    assert float(model.weight.detach()) == -0.5
    assert training._session.now.compiled is compiled


@pytest.mark.spec("optimizers", 20)
def test_setting_an_unchanged_optimizer_keeps_the_momentum():
    model, optimizer, training = wrapped(
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5)
    )
    for _ in range(3):
        training(torch.ones(1))
        training.setOptimizer(optimizer)
    assert float(model.weight.detach()) == -(1 + 1.5 + 1.75)


@pytest.mark.spec("optimizers", 23)
def test_a_weight_left_out_stays():
    model, _, training = wrapped(lambda m: torch.optim.AdamW([m.weight], lr=0.5, weight_decay=0.1))
    training(torch.ones(1))
    assert float(model.other.detach()) == 1.0
    assert float(model.weight.detach()) == pytest.approx(-0.5)


@pytest.mark.spec("optimizers", 30)
def test_a_copy_may_be_set():
    model, optimizer, training = wrapped(
        lambda m: poptorch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5, loss_scaling=4.0)
    )
    training(torch.ones(1))
    other = copy.copy(optimizer)
    other.param_groups[0]["lr"] = 0.0
    training.setOptimizer(other)
    training(torch.ones(1))
    assert float(model.weight.detach()) == -1.0
    assert other.loss_scaling == 4.0


@pytest.mark.spec("optimizers", 29)
@pytest.mark.parametrize("before", [True, False])
def test_the_optimizer_may_be_made_before_or_after_wrapping(before):
    model, _, training = wrapped(
        (lambda m: torch.optim.SGD([m.other, m.weight], lr=1.0)) if before else None
    )
    if not before:
        training.setOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    training(torch.ones(1))
    assert float(model.weight.detach()) == -1.0
