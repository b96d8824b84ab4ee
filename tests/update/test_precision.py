"""Half weights, moments and accumulators: what is kept in which type, and how precisely."""

import pytest
import torch

import poptorch.optim
from helpers.updating import Training, Workload


def test_half_weights_are_updated_in_single_precision_and_rounded_once():
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
    ours = Training(poptorch.optim.SGD([weight], lr=2.0**15), {"w": weight}, torch.float32)
    ours.step({"w": torch.tensor([2.0**-26])})  # would be zero in half
    assert ours.weight("w").dtype == torch.float16
    assert float(ours.weight("w")) == 1 - 2.0**-11


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB", "RMSprop"])
def test_moment_types(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(poptorch.optim, name)(
        [weight],
        first_order_momentum_accum_type=torch.float16,
        second_order_momentum_accum_type=torch.float32,
    )
    ours = Training(optimizer, {"w": weight})
    ours.step({"w": torch.ones(3)})
    dtypes = {k: t.dtype for k, t in ours.tensors.items() if k.startswith("optstate") and t.dim()}
    half, single = torch.float16, torch.float32
    adam_like = {"optstate.first.w": half, "optstate.second.w": single}
    assert dtypes == ({"optstate.square.w": single} if name == "RMSprop" else adam_like)


@pytest.mark.parametrize("scaling", [1.0, 1024.0])
def test_a_half_velocity_is_held_scaled_like_the_gradients(scaling):
    tiny = 2.0**-26  # not representable in half
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = poptorch.optim.SGD(
        [weight],
        lr=1.0,
        momentum=0.5,
        nesterov=True,
        loss_scaling=scaling,
        velocity_accum_type=torch.float16,
    )
    ours = Training(optimizer, {"w": weight})
    for _ in range(2):
        ours.step({"w": torch.tensor([tiny])})
    kept = scaling > 1
    assert float(ours.state("velocity", "w")) == (scaling * 1.5 * tiny if kept else 0.0)
    # Nesterov: 1.5 and 1.75 times the gradient; without the velocity each step is 1 + 0.5.
    assert float(ours.weight("w")) == -tiny * (1.5 + (1.75 if kept else 1.5))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_half_runs_are_no_further_from_double_than_torchs(name):
    """Twenty updates of half weights; torch computes every operation in half."""
    work = Workload("perceptron")
    settings = {"lr": 2.0**-7, "eps": 1e-4} if name != "SGD" else {"lr": 0.1, "momentum": 0.9}
    half = {n: torch.nn.Parameter(p.detach().half()) for n, p in work.parameters.items()}
    exact = {n: torch.nn.Parameter(p.detach().double()) for n, p in half.items()}
    other = {n: torch.nn.Parameter(p.detach().clone()) for n, p in half.items()}
    make = getattr(poptorch.optim, name)
    ours = Training(make(half.values(), **settings), half, torch.float32)
    natives = [(params, make(params.values(), **settings)) for params in (exact, other)]
    for _ in range(20):
        work.take({n: p.detach() for n, p in exact.items()})
        gradients = {n: g.half() for n, g in work.gradients().items()}
        ours.step({n: g.float() for n, g in gradients.items()})
        for params, native in natives:
            for path, parameter in params.items():
                parameter.grad = gradients[path].to(parameter.dtype)
            native.step()
    distance = {"ours": 0.0, "torch": 0.0}
    for n, parameter in exact.items():
        want = parameter.detach()
        distance["ours"] += float((ours.weight(n).double() - want).square().sum())
        distance["torch"] += float((other[n].detach().double() - want).square().sum())
    assert 0 < distance["ours"] <= distance["torch"]


def test_bias_correction_is_precise_on_the_first_step():
    """1 - 0.999 in float32 is off by 5e-5; the update must not be."""
    weight = torch.nn.Parameter(torch.zeros(1))
    for variable in ({}, {"betas": (0.9, 0.999)}):
        optimizer = poptorch.optim.LAMB(
            [weight], bias_correction=False, weight_decay=0.0, **variable
        )
        ours = Training(optimizer, {"w": weight})
        ours.step({"w": torch.tensor([1.0])})
        assert float(ours.state("second", "w")) == pytest.approx(0.001, rel=2e-7)
