"""Stochastic rounding through the executor: casts, products, updates, accumulators."""

import pytest
import torch

import poptorch
from helpers.closeness import relative
from helpers.twins import Twins
from helpers.wrapping import Calling, Graded, Having, infer, options, training

COUNT = 20_000


def weights(dtype=torch.float16):
    return Having(lambda m, x: poptorch.identity_loss((m.weight * x).float().sum(), "none"),
                  weight=torch.nn.Parameter(torch.ones(COUNT, dtype=dtype)))  # fmt: skip


def rounding(seed=1, enabled=True, **counts):
    opts = options(**counts).randomSeed(seed)
    opts.Precision.enableStochasticRounding(enabled)
    return opts


def trained(opts, lr=2.0**-13, calls=4, rows=1):
    model = weights()
    wrapped = training(model, opts, lr)
    for _ in range(calls):
        wrapped(torch.ones(rows, 1).half())
    return model.weight.detach().double(), wrapped


def test_updates_too_small_for_half_arrive_on_average():
    """Each update is a quarter of the distance to the next half number below 1."""
    rounded, _ = trained(rounding())
    want = 1 - 4 * 2.0**-13
    deviation = (4 * 2.0**-22 * 0.25 * 0.75 / COUNT) ** 0.5
    assert abs(float(rounded.mean()) - want) < 5 * deviation
    nearest, _ = trained(rounding(enabled=False))
    assert torch.equal(nearest, torch.ones_like(nearest))


@pytest.mark.slow
def test_one_seed_one_sequence_that_continues_after_detaching() -> None:
    want, _ = trained(rounding(seed=1))
    assert not torch.equal(want, trained(rounding(seed=2))[0])
    _, wrapped = trained(rounding(seed=1), calls=2)
    wrapped.detachFromDevice()
    for _ in range(2):
        wrapped(torch.ones(1, 1).half())
    assert torch.equal(wrapped.model.weight.detach().double(), want)
    replicated, _ = trained(rounding(replicas=2), rows=2)
    assert torch.equal(replicated, want)  # the same mean gradient, the same stream


def test_half_accumulators_are_unbiased():
    """Gradients of 1 + 2**-12 cannot be added up in half; on average they are."""
    opts = rounding(accumulation=4)
    opts.lanes(1)
    model = weights(torch.float32)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    poptorch.trainingModel(model, opts, optimizer)(torch.full((4, 1), 1 + 2.0**-12))
    moved = 1 - model.weight.detach().double()
    assert abs(float(moved.mean()) - (1 + 2.0**-12)) < 5 * 2.0**-10 / COUNT**0.5
    assert float(moved.std()) > 0


def test_exact_values_and_float_results_stay():
    x = torch.randn(1000).half()
    got = infer(lambda x: (x.float().half(), x.float() * 3.1), x, opts=rounding())
    assert torch.equal(got[0], x)
    assert torch.equal(got[1], x.float() * 3.1)
    assert trained(rounding(), lr=2.0**-11)[0].unique().tolist() == [1 - 4 * 2.0**-11]


@pytest.mark.spec("precision", 12)
def test_it_acts_in_inference_until_it_is_switched_off():
    between = 1 + 2.0**-12
    x = torch.full((COUNT,), between)
    products = torch.tensor([[1.0, 2.0**-12]]).half(), torch.ones(2, COUNT).half()
    for function, inputs in ((torch.Tensor.half, (x,)), (torch.matmul, products)):
        wrapped = poptorch.inferenceModel(Calling(function), rounding())
        rounded, next_call = wrapped(*inputs).double(), wrapped(*inputs)
        assert not torch.equal(rounded, next_call.double())
        assert torch.equal(rounded, infer(function, *inputs, opts=rounding()).double())
        assert sorted(rounded.unique().tolist()) == [1.0, 1 + 2.0**-10]
        deviation = 2.0**-10 * (0.25 * 0.75 / COUNT) ** 0.5
        assert abs(float(rounded.mean()) - between) < 5 * deviation
        assert infer(function, *inputs, opts=rounding(enabled=False)).unique().tolist() == [1.0]


def test_batch_norms_in_half_train():
    """Torch says of their running statistics, which are half, that they are float32."""
    close = {"rtol": 0, "atol": relative(4, dtype=torch.half)}
    model = Graded(norm=torch.nn.BatchNorm1d(4)).half()
    twins = Twins(model, lambda p: torch.optim.SGD(p, 0.125), rounding(), **close)
    twins.step(torch.randn(8, 4).half(), torch.zeros(8, 4).half(), count=3)
    assert model.norm.running_mean.dtype == torch.half
    twins.compare()
