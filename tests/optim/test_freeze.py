"""Optimizers frozen: types, constness, snapshots, groups, errors and warnings."""

import logging
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


@pytest.mark.spec("optimizers", 12)
@pytest.mark.parametrize(
    "make, algorithm",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: torch.optim.Adam(p), "adam"),
        (lambda p: torch.optim.AdamW(p), "adamw"),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "adamw"),
        (lambda p: torch.optim.RMSprop(p), "rmsprop"),
        (lambda p: optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: optim.SGD(p, lr=0.1, use_combined_accum=True), "sgd_combined"),
        (lambda p: optim.Adam(p), "adam"),
        (lambda p: optim.AdamW(p), "adamw"),
        (lambda p: optim.RMSprop(p), "rmsprop"),
        (lambda p: optim.LAMB(p), "lamb"),
    ],
)
def test_algorithms(make, algorithm, weights, caplog):
    spec, _ = frozen(make(weights))
    assert spec.algorithm == algorithm
    assert spec.groups[0].params == ("p1", "p2", "p3")
    assert not caplog.records


@pytest.mark.parametrize("wrong", [torch.optim.Adagrad, torch.optim.NAdam])
def test_unsupported_types(wrong, weights):
    with pytest.raises(AssertionError, match="Unsupported optimizer type") as caught:
        frozen(wrong(weights))
    assert wrong.__name__ in str(caught.value)
    assert isinstance(caught.value, poptorch.Error)


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


def constness(optimizer):
    spec, _ = frozen(optimizer)
    return set(spec.groups[0].variables) | set(spec.variables)


class TestConstness:
    @pytest.mark.spec("optimizers", 8)
    def test_torch_by_value(self, weights):
        assert constness(torch.optim.SGD(weights, lr=0.1)) == {"lr"}
        explicit = torch.optim.SGD(weights, lr=0.1, momentum=0.0, weight_decay=0.0)
        assert frozen(explicit) == frozen(torch.optim.SGD(weights, lr=0.1))
        assert constness(torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)) == {
            "lr",
            "momentum",
        }
        adam = {"lr", "beta1", "beta2", "eps"}
        assert constness(torch.optim.Adam(weights)) == adam
        assert constness(torch.optim.AdamW(weights)) == adam | {"weight_decay"}
        assert constness(torch.optim.Adam(weights, weight_decay=0.01)) == adam | {"weight_decay"}
        assert constness(torch.optim.RMSprop(weights, alpha=0.5, momentum=0.1)) == {
            *("lr", "alpha", "eps", "momentum"),
        }

    @pytest.mark.spec("optimizers", 8)
    def test_poptorch_by_what_was_passed(self, weights):
        assert constness(optim.Adam(weights)) == set()
        assert constness(optim.Adam(weights, eps=1e-8, loss_scaling=1.0)) == {
            "eps",
            "loss_scaling",
        }
        assert constness(optim.SGD(weights, 0.1, nesterov=False)) == {"lr", "nesterov"}
        marked = optim.AdamW(weights, lr=0.1)
        marked.variable_attrs.markAsVariable("betas")
        marked.variable_attrs.markAsConstant("lr")
        assert constness(marked) == {"beta1", "beta2"}

    @pytest.mark.spec("optimizers", 9)
    def test_equivalent_torch_and_poptorch_optimizers_freeze_alike(self, weights):
        """A torch optimizer takes over what is variable from the one that it replaces."""
        for name in ("SGD", "Adam", "AdamW", "RMSprop"):
            native, own = (getattr(lib, name)(weights, lr=0.1) for lib in (torch.optim, optim))
            assert frozen(native, compiled=frozen(own)[0]) == frozen(own)

    def test_automatic_loss_scaling_makes_the_scale_variable(self, weights):
        spec, values = frozen(torch.optim.SGD(weights, lr=0.1), automatic_loss_scaling=True)
        assert spec.variables == ("loss_scaling",)
        assert values["hyper.loss_scaling"] == 1.0


def test_values_are_a_snapshot(weights):
    optimizer = optim.SGD(weights, lr=0.1, momentum=0.9)
    spec, values = frozen(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert values == {"hyper.0.lr": 0.1, "hyper.0.momentum": 0.9}
    assert frozen(optimizer) == (spec, {"hyper.0.lr": 0.5, "hyper.0.momentum": 0.9})


def test_groups(weights):
    groups = [{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "weight_decay": 0.3}]
    spec, values = frozen(optim.SGD(groups, lr=0.1))
    assert values == {"hyper.0.lr": 0.2, "hyper.1.lr": 0.1}
    assert [g.params for g in spec.groups] == [("p1",), ("p2", "p3")]
    assert [g.setting("weight_decay") for g in spec.groups] == [0.0, 0.3]


def test_only_trainable_parameters_of_the_model(weights):
    weights[1].requires_grad_(False)
    optimizer = torch.optim.SGD([*weights, torch.nn.Parameter(torch.zeros(9))], lr=0.1)
    shared = weights[2].detach().view(-1)  # found by its storage, not by identity
    paths = {weights[0].data_ptr(): "a", weights[1].data_ptr(): "b", shared.data_ptr(): "c"}
    spec, _ = freeze(optimizer, paths)
    assert spec.groups[0].params == ("a", "c")


def test_scalar_tensors_become_numbers(weights):
    _, values = frozen(torch.optim.SGD(weights, lr=torch.tensor(0.25)))
    assert values == {"hyper.0.lr": 0.25}
    optimizer = optim.SGD(weights, lr=0.1)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(AssertionError, match="Expected a number for lr"):
        frozen(optimizer)


def test_lists_of_betas_in_loaded_groups_are_pairs(weights):
    optimizer = optim.Adam(weights, betas=(0.5, 0.75))
    optimizer.param_groups[0]["betas"] = [0.25, 0.5]
    assert frozen(optimizer)[1] == {
        "hyper.0.one_minus_beta1": 0.75,
        "hyper.0.one_minus_beta2": 0.5,
    }


class TestWrongUse:
    @pytest.mark.parametrize("library", [torch.optim, optim])
    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    def test_amsgrad(self, library, name, weights):
        with pytest.raises(ValueError, match="Only non-amsgrad"):
            frozen(getattr(library, name)(weights, amsgrad=True))

    @pytest.mark.spec("optimizers", 27)
    def test_centered_must_agree(self, weights):
        groups = [{"params": weights[:1], "centered": True}, {"params": weights[1:]}]
        with pytest.raises(AssertionError, match="centered"):
            frozen(torch.optim.RMSprop(groups))
        spec, _ = frozen(torch.optim.RMSprop(weights, centered=True))
        assert spec.setting("centered") is True

    def test_the_tensorflow_variant_is_for_rmsprop(self, weights):
        optimizer = optim.Adam(weights)
        optimizer.use_tf_variant = True
        with pytest.raises(ValueError, match="use_tf_variant"):
            frozen(optimizer)

    def test_clipping_limits(self, weights):
        with pytest.raises(poptorch.Error, match="cannot be NaN"):
            frozen(optim.Adam(weights, max_grad_norm=math.nan))
        with pytest.raises(ValueError, match="cannot be negative"):
            frozen(optim.Adam(weights, max_grad_norm=-1.0))

    def test_nesterov_without_momentum(self, weights):
        optimizer = optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(ValueError, match="Nesterov momentum requires"):
            frozen(optimizer)


def test_schedulers_drive_our_classes(weights, caplog):
    with caplog.at_level(logging.WARNING):
        optimizer = optim.SGD(weights, lr=0.1, momentum=0.8)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
        optimizer._opt_called = True
        spec, first = frozen(optimizer)
        scheduler.step()
        after, second = frozen(optimizer)
    assert spec == after
    assert first["hyper.0.lr"] < second["hyper.0.lr"]
    assert first["hyper.0.momentum"] > second["hyper.0.momentum"]


@pytest.mark.parametrize("name", ["loss_scaling", "velocity_scaling"])
@pytest.mark.parametrize("value", [0.0, -2.0, math.inf, math.nan])
def test_a_scaling_is_a_positive_number(name, value, weights):
    paths = {w.data_ptr(): f"w{at}" for at, w in enumerate(weights)}
    optimizer = optim.SGD(weights, lr=0.1, momentum=0.9, use_combined_accum=True, **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be a positive number"):
        freeze(optimizer, paths)
