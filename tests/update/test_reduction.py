"""Means and sums against one large batch; stochastic rounding of what an update stores."""

import functools

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Having, options
from poptorch import MeanReductionStrategy, ReductionType
from poptorch._update.step import RandomRounding

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


COUNT = 1 << 16
VALUES = [1.0 + 2.0**-12, -3.3, 1000.1, 2.0**-15 * 1.0001, -(2.0**-25), 6.0e-8, 0.1]


def store(values, counter=0, dtype=torch.float16):
    return RandomRounding(torch.tensor(counter))(values, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unbiased_between_the_two_neighbours(dtype):
    for value in torch.tensor(VALUES):
        got = store(value.expand(COUNT), dtype=dtype).double()
        found, value = got.unique(), float(value)
        assert len(found) <= 2
        assert float(found.min()) <= value <= float(found.max())
        # 5 standard deviations of the mean of COUNT coins that land one step apart
        step = float(found.max() - found.min())
        assert abs(float(got.mean()) - value) <= 5 * 0.5 * step / COUNT**0.5 + 1e-12
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every[~every.isnan()]  # what is representable stays
    assert torch.equal(store(exact.float(), dtype=dtype), exact)
    assert store(torch.tensor([float("nan")]), dtype=dtype).isnan().all()


def test_streams():
    values = torch.full((COUNT,), 1 + 2.0**-11)
    stores = RandomRounding(torch.tensor(7))
    first, second = stores(values, torch.float16), stores(values, torch.float16)
    again, later = store(values, 7), store(values, 8)
    assert torch.equal(first, again)
    for other in (second, later):
        share = float((first == other).double().mean())
        assert 0.48 < share < 0.52  # independent coins agree half of the time
    up = (first > 1).double()
    assert abs(float((up[1:] * up[:-1]).mean()) - 0.25) < 0.01  # so do neighbours
