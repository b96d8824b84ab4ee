"""Means and sums against one large batch."""

import functools

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Having, options
from poptorch import MeanReductionStrategy, ReductionType

OPTIMIZERS = {"SGD momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
              "SGD combined": {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True},
              "Adam": {"lr": 0.01, "max_grad_norm": 0.1}, "RMSprop": {"lr": 0.01, "centered": True},
              "LAMB": {"lr": 0.01}}  # fmt: skip
MODES = [*((ReductionType.Mean, strategy) for strategy in MeanReductionStrategy),
         (ReductionType.Sum, MeanReductionStrategy.Post)]  # fmt: skip


def trained(name, opts, reduction):
    torch.manual_seed(0)
    layers, loss = ((nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
                    nn.CrossEntropyLoss(reduction=reduction))  # fmt: skip
    model = Having(lambda m, x, labels: loss(m.model(x), labels), model=nn.Sequential(*layers))
    inputs = torch.randn(32, 6)
    optimizer = getattr(poptorch.optim, name.split()[0])(model.parameters(), **OPTIMIZERS[name])
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    for _ in range(3):
        wrapped(inputs, torch.arange(32) % 3)
    return {path: p.detach().clone() for path, p in model.named_parameters()}


@functools.cache
def whole(name, reduction):
    """What one batch of 32 makes of the weights."""
    return trained(name, options(), reduction)


def equals_one_batch(name, mode, opts):
    kind, strategy = mode
    reduction = "mean" if kind is ReductionType.Mean else "sum"
    opts.Training.accumulationAndReplicationReductionType(kind)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    got = trained(name, opts, reduction)
    for path, value in whole(name, reduction).items():
        torch.testing.assert_close(got[path], value, **near(32 + FUNCTION, 3, size=0.1))


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize("name, mode, lanes", [
    *(("SGD combined", mode, 1) for mode in range(4)),  # adds gradients to its velocity
    *(("Adam", mode, mode % 2) for mode in range(4)),  # clips; 0: side by side
    ("SGD combined", 1, 0), ("RMSprop", 2, 0), ("LAMB", 3, 0),
])  # fmt: skip
def test_eight_micro_batches_of_four_equal_one_of_32(name, mode, lanes):
    equals_one_batch(name, MODES[mode], options(accumulation=8).lanes(lanes))


@pytest.mark.spec("optimizers", 21)
@pytest.mark.spec("parallel", 31)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("backend", "lanes", "replicas"), [("reference", 1, 4), ("reference", 0, 2), ("staged", 0, 2)]
)
def test_replicas_and_accumulation_together_equal_one_batch(backend, lanes, replicas, mode):
    """Of an optimizer whose steps are as long as its gradients."""
    opts = options(backend, accumulation=8 // replicas, replicas=replicas).lanes(lanes)
    equals_one_batch("SGD momentum", mode, opts)
