"""Constructors: arguments, attributes, errors, native use, copies."""

import copy
import inspect
import logging
import pickle

import pytest
import torch

import poptorch
from helpers import plain_optimizers as plain
from poptorch import optim

CLASSES = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB]
ORDER = {
    optim.SGD: "params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, "
    "differentiable, loss_scaling, velocity_scaling, use_combined_accum, accum_type, "
    "velocity_accum_type, max_grad_norm",
    optim.Adam: "params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, "
    "differentiable, fused, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, max_grad_norm",
    optim.AdamW: "params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, "
    "differentiable, fused, loss_scaling, bias_correction, accum_type, "
    "first_order_momentum_accum_type, second_order_momentum_accum_type, max_grad_norm",
    optim.RMSprop: "params, lr, alpha, eps, weight_decay, momentum, centered, foreach, maximize, "
    "differentiable, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, use_tf_variant",
    optim.LAMB: "params, lr, betas, eps, weight_decay, bias_correction, loss_scaling, "
    "max_weight_norm, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type",
}


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("cls", CLASSES)
def test_order_of_arguments(cls):
    assert [*inspect.signature(cls).parameters] == ORDER[cls].split(", ")


@pytest.mark.parametrize("cls", CLASSES)
def test_both_bases(cls, weight):
    optimizer = cls([weight], lr=0.1)
    native = torch.optim.Optimizer if cls is optim.LAMB else getattr(torch.optim, cls.__name__)
    assert isinstance(optimizer, native)
    assert isinstance(optimizer, optim.Optimizer)
    assert cls.__bases__[0] is optim.Optimizer


@pytest.mark.parametrize("cls", CLASSES)
def test_own_attributes_are_on_the_object_and_not_in_groups(cls, weight):
    optimizer = cls([weight], lr=0.1)
    assert optimizer.loss_scaling == 1.0
    assert optimizer.accum_type == torch.float32
    assert cls._child_vars == ["loss_scaling"]
    for name in cls._own.keys() - {"max_weight_norm"}:
        assert hasattr(optimizer, name)
        assert name not in optimizer.param_groups[0]


def test_defaults(weight):
    adamw, lamb = optim.AdamW([weight]), optim.LAMB([weight])
    assert (adamw.bias_correction, adamw.max_grad_norm) == (True, float("inf"))
    assert adamw.defaults["weight_decay"] == lamb.defaults["weight_decay"] == 0.01
    assert (lamb.defaults["lr"], lamb.max_weight_norm) == (1e-3, 65500.0)
    rmsprop = optim.RMSprop([weight])
    assert (rmsprop.defaults["alpha"], rmsprop.use_tf_variant) == (0.99, False)
    with pytest.raises(TypeError):
        optim.SGD([weight])


@pytest.mark.parametrize("cls", CLASSES)
def test_accumulation_types(cls, weight):
    assert cls([weight], lr=0.1, accum_type=torch.float16).accum_type == torch.float16
    for name in [n for n in cls._own if n.endswith("accum_type")]:
        with pytest.raises(AssertionError, match="Accumulation types must be either") as caught:
            cls([weight], lr=0.1, **{name: torch.bfloat16})
        assert isinstance(caught.value, poptorch.Error)


@pytest.mark.spec("optimizers", 26)
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.LAMB])
def test_betas_from_configuration_files(cls, weight):
    assert cls([weight], betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)
    for wrong in (0.9, (0.9,), [0.9, 0.99, 0.999], "ab", (0.9, "0.99")):
        with pytest.raises(AssertionError, match="Expected a pair for betas"):
            cls([weight], betas=wrong)


@pytest.mark.spec("optimizers", 13)
def test_velocity_scaling_needs_the_combined_variant(weight, caplog):
    with caplog.at_level(logging.WARNING):
        separate = optim.SGD([weight], lr=0.1, velocity_scaling=4.0)
    assert "velocity_scaling value ignored" in caplog.text
    assert "loss_scaling scales a float16 one" in caplog.text
    assert "velocity_scaling" not in separate.param_groups[0]
    assert "velocity_scaling" not in separate.defaults
    caplog.clear()
    groups = [{"params": [weight], "velocity_scaling": 2.0}]
    combined = optim.SGD(groups, lr=0.1, velocity_scaling=4.0, use_combined_accum=True)
    assert not caplog.records
    assert combined.defaults["velocity_scaling"] == 4.0
    assert combined.param_groups[0]["velocity_scaling"] == 2.0


def test_nesterov_needs_momentum(weight):
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        optim.SGD([weight], lr=0.1, nesterov=True)


def test_named_parameters(weight):
    optimizer = optim.Adam([("layer.weight", weight)])
    assert optimizer.param_groups[0]["param_names"] == ["layer.weight"]


@pytest.mark.parametrize("cls", CLASSES[:-1])
def test_native_steps_are_torchs(cls, weight):
    other = torch.nn.Parameter(weight.detach().clone())
    ours, native = cls([weight], lr=0.1), getattr(torch.optim, cls.__name__)([other], lr=0.1)
    for optimizer, parameter in ((ours, weight), (native, other)):
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weight, other)
    assert weight.grad is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"lr": 0.1, "max_weight_norm": 0.5, "weight_decay": 0.0}, {"bias_correction": False}],
)
def test_native_lamb(settings, weight):
    idle = torch.nn.Parameter(torch.ones(1))
    optimizer = optim.LAMB([weight, idle], **settings)
    want, state = {"w": weight.detach().double()}, {}
    for t in range(1, 21):
        gradient = torch.randn(2)
        weight.grad = gradient.clone()
        assert optimizer.step(lambda: 7) == 7
        want = plain.lamb(want, {"w": gradient.double()}, state, t, **settings)
    torch.testing.assert_close(weight.detach().double(), want["w"], rtol=1e-5, atol=1e-6)
    assert idle.tolist() == [1.0]


class TestVariableAttributes:
    def test_what_is_passed_is_variable(self, weight):
        attributes = optim.Adam([weight], eps=1e-8, loss_scaling=1.0).variable_attrs
        assert isinstance(attributes, optim.VariableAttributes)
        assert not attributes.isConstant("eps")
        assert not attributes.isConstant("loss_scaling")
        assert attributes.isConstant("lr")
        assert attributes.isConstant("betas")
        assert not optim.SGD([weight], 0.1).variable_attrs.isConstant("lr")

    def test_group_settings_stay_constant(self, weight):
        groups = [{"params": [weight], "weight_decay": 0.5}]
        assert optim.SGD(groups, lr=0.1).variable_attrs.isConstant("weight_decay")

    @pytest.mark.parametrize("cls", CLASSES)
    def test_marking(self, cls, weight):
        attributes = cls([weight], lr=0.1).variable_attrs
        for name in ("weight_decay", "loss_scaling"):
            attributes.markAsVariable(name)
            assert not attributes.isConstant(name)
            attributes.markAsConstant(name)
            assert attributes.isConstant(name)
        for mark in (attributes.markAsConstant, attributes.markAsVariable):
            with pytest.raises(AssertionError, match="Unknown attribute"):
                mark("velocity")


def replicas_of(optimizer):
    yield copy.copy(optimizer)
    yield copy.deepcopy(optimizer)
    yield pickle.loads(pickle.dumps(optimizer))


@pytest.mark.spec("optimizers", 30)
def test_copies_keep_what_torch_does_not_know(weight):
    optimizer = optim.SGD(
        [weight], 0.1, loss_scaling=8.0, velocity_scaling=4.0, use_combined_accum=True
    )
    optimizer.variable_attrs.markAsVariable("momentum")
    for other in replicas_of(optimizer):
        assert (other.loss_scaling, other.velocity_scaling) == (8.0, 4.0)
        assert other.use_combined_accum
        assert other.param_groups[0]["velocity_scaling"] == 4.0
        assert not other.variable_attrs.isConstant("momentum")
        assert not other.has_state()
        assert not other.ipu_state_is_dirty
        other.param_groups[0]["lr"] = 0.5
        other.variable_attrs.markAsConstant("momentum")
        other.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.variable_attrs.isConstant("momentum")
    assert copy.copy(optimizer).param_groups[0]["params"][0] is weight


def test_copies_keep_the_state_and_must_upload_it(weight):
    optimizer = optim.Adam([weight])
    optimizer.set_state_dict({"ipu_state": {"Accl1___w": torch.ones(2)}, "ipu_param": {}})
    optimizer.ipu_state_is_dirty = False
    for other in replicas_of(optimizer):
        assert other.ipu_state_is_dirty
        assert other.state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]
