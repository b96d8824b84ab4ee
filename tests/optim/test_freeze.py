"""Optimizers frozen: types, constness, snapshots, groups, errors and warnings."""

import math

import pytest
import torch

import poptorch
from poptorch import optim
from poptorch.optim.freeze import freeze


@pytest.fixture
def weights():
    return [torch.nn.Parameter(torch.zeros(n + 1)) for n in range(3)]


def frozen(optimizer, **settings):
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return freeze(optimizer, {p.data_ptr(): f"p{p.numel()}" for p in parameters}, **settings)


ADAM = {"lr", "beta1", "beta2", "eps"}
KINDS = {  # the algorithm, and what is variable
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), "sgd", {"lr"}),
    "with momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "sgd",
        {"lr", "momentum"},
    ),
    "Adam": (torch.optim.Adam, "adam", ADAM),
    "decayed": (lambda p: torch.optim.Adam(p, weight_decay=0.01), "adam", {*ADAM, "weight_decay"}),
    "AdamW": (torch.optim.AdamW, "adamw", {*ADAM, "weight_decay"}),
    "decoupled": (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "adamw", ADAM),
    "RMSprop": (
        lambda p: torch.optim.RMSprop(p, alpha=0.5, momentum=0.1),
        "rmsprop",
        {"lr", "alpha", "eps", "momentum"},
    ),
    "ours": (lambda p: optim.SGD(p, 0.1, nesterov=False), "sgd", {"lr", "nesterov"}),
    "combined": (lambda p: optim.SGD(p, lr=0.1, use_combined_accum=True), "sgd_combined", {"lr"}),
    "our Adam": (
        lambda p: optim.Adam(p, eps=1e-8, loss_scaling=1.0),
        "adam",
        {"eps", "loss_scaling"},
    ),
    "our AdamW": (optim.AdamW, "adamw", set()),
    "our RMSprop": (lambda p: optim.RMSprop(p, alpha=0.9), "rmsprop", {"alpha"}),
    "LAMB": (lambda p: optim.LAMB(p, betas=(0.8, 0.9)), "lamb", {"beta1", "beta2"}),
}


@pytest.mark.spec("optimizers", 8, 12)
@pytest.mark.parametrize(("make", "algorithm", "variables"), KINDS.values(), ids=KINDS)
def test_algorithms_and_constness(make, algorithm, variables, weights, caplog):
    """Torch's by value, ours by what was passed."""
    spec, _ = frozen(make(weights))
    assert spec.algorithm == algorithm
    assert {*spec.groups[0].variables, *spec.variables} == variables
    assert spec.groups[0].params == ("p1", "p2", "p3")
    assert not caplog.records


@pytest.mark.spec("optimizers", 12)
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, optim.AdamW, optim.LAMB])
def test_subclasses_are_warned_about_once(base, weights, caplog):
    class Mine(base):
        def step(self, closure=None):
            raise NotImplementedError

    optimizer = Mine(weights, lr=0.1)
    frozen(optimizer)
    frozen(optimizer)
    (record,) = caplog.records
    assert "Poptorch does not run Python optimizer code directly" in record.getMessage()
    assert "Mine" in record.getMessage()


@pytest.mark.spec("optimizers", 9)
def test_equivalent_torch_and_poptorch_optimizers_freeze_alike(weights):
    """A torch optimizer takes over what is variable from the one that it replaces."""
    for name in ("SGD", "Adam", "AdamW", "RMSprop"):
        native, own = (getattr(lib, name)(weights, lr=0.1) for lib in (torch.optim, optim))
        assert frozen(native, compiled=frozen(own)[0]) == frozen(own)


def test_values_of_groups_are_a_snapshot(weights):
    groups = [
        {"params": weights[:1], "lr": torch.tensor(0.25)},
        {"params": weights[1:], "weight_decay": 0.3},
    ]
    optimizer = optim.SGD(groups, lr=0.1)
    spec, values = frozen(optimizer)
    optimizer.param_groups[1]["lr"] = 0.5
    assert values == {"hyper.0.lr": 0.25, "hyper.1.lr": 0.1}
    assert [g.params for g in spec.groups] == [("p1",), ("p2", "p3")]
    assert [g.setting("weight_decay") for g in spec.groups] == [0.0, 0.3]
    assert frozen(optimizer) == (spec, {"hyper.0.lr": 0.25, "hyper.1.lr": 0.5})
    adam = optim.Adam(weights, betas=(0.5, 0.75))
    adam.param_groups[0]["betas"] = [0.25, 0.5]  # as loaded from a file
    kept = {"hyper.0.one_minus_beta1": 0.75, "hyper.0.one_minus_beta2": 0.5}
    assert frozen(adam)[1] == kept


def test_only_trainable_parameters_of_the_model(weights):
    weights[1].requires_grad_(False)
    optimizer = torch.optim.SGD([*weights, torch.nn.Parameter(torch.zeros(9))], lr=0.1)
    shared = weights[2].detach().view(-1)  # found by its storage, not by identity
    paths = {weights[0].data_ptr(): "a", weights[1].data_ptr(): "b", shared.data_ptr(): "c"}
    spec, _ = freeze(optimizer, paths)
    assert spec.groups[0].params == ("a", "c")


def edited(optimizer, **numbers):
    vars(optimizer).update(numbers)
    optimizer.param_groups[0].update(numbers)
    return optimizer


def scaled(**scaling):
    return lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True, **scaling)


REFUSED = {
    "Adagrad": (torch.optim.Adagrad, AssertionError, "Unsupported optimizer type"),
    "NAdam": (torch.optim.NAdam, AssertionError, "Unsupported optimizer type"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), ValueError, "Only non-amsgrad"),
    "centered in one group": (
        lambda p: torch.optim.RMSprop([{"params": p[:1], "centered": True}, {"params": p[1:]}]),
        AssertionError,
        "centered",
    ),
    "a variant": (lambda p: edited(optim.Adam(p), use_tf_variant=True), ValueError, "variant"),
    "NaN": (lambda p: optim.Adam(p, max_grad_norm=math.nan), poptorch.Error, "cannot be NaN"),
    "negative": (lambda p: optim.Adam(p, max_grad_norm=-1.0), ValueError, "cannot be negative"),
    "nesterov": (
        lambda p: edited(optim.SGD(p, 0.1, momentum=0.9, nesterov=True), momentum=0.0),
        ValueError,
        "Nesterov momentum requires",
    ),
    **{
        f"{name} {value}": (scaled(**{name: value}), ValueError, f"{name} must be a positive")
        for name in ("loss_scaling", "velocity_scaling")
        for value in (0.0, -2.0, math.inf, math.nan)
    },
}


@pytest.mark.spec("optimizers", 27)
@pytest.mark.parametrize(("make", "error", "said"), REFUSED.values(), ids=REFUSED)
def test_wrong_use(make, error, said, weights):
    with pytest.raises(error, match=said) as caught:
        frozen(make(weights))
    assert isinstance(caught.value, poptorch.Error)
