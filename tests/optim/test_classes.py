"""Constructors of optimizers: arguments, defaults, attributes, and values that are refused."""

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from helpers import plain_optimizers as plain
from helpers.closeness import FUNCTION, near
from poptorch import optim
from poptorch.optim import arguments

F16 = torch.float16

Class = type[torch.optim.Optimizer]

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
ADAM_ARGUMENTS = {*inspect.signature(torch.optim.Adam).parameters}

# By name: arguments in the positional order of the 1.x releases, and what they set.
OLD: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "SGD": (
        (0.1, 0.9, 0.0, 0.0, False, 128.0, None, True),
        {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True},
    ),
    "Adam": (
        (0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, F16),
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-7, "accum_type": F16},
    ),
    "AdamW": (
        (0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, False),
        {"weight_decay": 0.1, "bias_correction": False},
    ),
    "RMSprop": (
        (0.1, 0.9, 1e-7, 0.1, 0.5, True, 128.0, F16, None, None, True),
        {"lr": 0.1, "centered": True, "use_tf_variant": True},
    ),
}


@pytest.fixture
def weight() -> nn.Parameter:
    """Return a parameter of two numbers."""
    return nn.Parameter(torch.tensor([1.0, -2.0]))


def native_of(cls: Class) -> Class:
    """Return the optimizer of torch that has this name, if there is one."""
    native: Class = getattr(torch.optim, cls.__name__, torch.optim.Optimizer)
    return native


def own_arguments(cls: Class) -> set[str]:
    """Return the arguments that torch's optimizer does not have."""
    return {*inspect.signature(cls).parameters} - {*inspect.signature(native_of(cls)).parameters}


each_class = pytest.mark.parametrize("cls", ORDER)

# Arguments and attributes.


@each_class
def test_arguments_have_the_documented_order(cls: Class) -> None:
    assert [*inspect.signature(cls).parameters] == ORDER[cls].split(", ")


@each_class
def test_an_optimizer_is_one_of_torch_and_one_of_poptorch(cls: Class, weight: nn.Parameter) -> None:
    assert isinstance(cls([weight], lr=0.1), native_of(cls))
    assert cls.__bases__[0] is optim.Optimizer


@each_class
def test_losses_are_not_scaled_and_gradients_are_added_up_in_float_by_default(
    cls: Class, weight: nn.Parameter
) -> None:
    optimizer = cls([weight], lr=0.1)

    assert optimizer.loss_scaling == 1.0
    assert optimizer.accum_type == torch.float32


@each_class
def test_arguments_that_torch_does_not_have_are_attributes(
    cls: Class, weight: nn.Parameter
) -> None:
    """The weight norm of LAMB is a number of each group, too."""
    optimizer = cls([weight], lr=0.1)
    for name in own_arguments(cls) - ADAM_ARGUMENTS - {"velocity_scaling"}:
        assert hasattr(optimizer, name)
        assert name not in optimizer.param_groups[0] or name == "max_weight_norm"


@each_class
@pytest.mark.parametrize("name", ["weight_decay", "loss_scaling"])
def test_an_attribute_can_be_marked_as_variable_and_as_constant(
    cls: Class, name: str, weight: nn.Parameter
) -> None:
    attributes = cls([weight], lr=0.1).variable_attrs

    attributes.markAsVariable(name)
    assert not attributes.isConstant(name)

    attributes.markAsConstant(name)
    assert attributes.isConstant(name)


@each_class
@pytest.mark.parametrize("mark", ["markAsConstant", "markAsVariable"])
def test_an_unknown_attribute_cannot_be_marked(cls: Class, mark: str, weight: nn.Parameter) -> None:
    attributes = cls([weight], lr=0.1).variable_attrs

    with pytest.raises(AssertionError, match="Unknown attribute"):
        getattr(attributes, mark)("velocity")


ACCUMULATION_TYPES = [
    (cls, name) for cls in ORDER for name in sorted(own_arguments(cls)) if "accum_type" in name
]


@pytest.mark.parametrize("cls, name", ACCUMULATION_TYPES)
def test_accumulation_types_are_float16_or_float32(
    cls: Class, name: str, weight: nn.Parameter
) -> None:
    assert getattr(cls([weight], lr=0.1, **{name: F16}), name) == F16

    with pytest.raises(AssertionError, match="Accumulation types must be either"):
        cls([weight], lr=0.1, **{name: torch.bfloat16})


# Defaults.


@pytest.mark.parametrize(
    "cls, name, expected",
    [
        (optim.AdamW, "bias_correction", True),
        (optim.AdamW, "max_grad_norm", float("inf")),
        (optim.LAMB, "max_weight_norm", 65500.0),
        (optim.RMSprop, "use_tf_variant", False),
    ],
)
def test_defaults_of_attributes(
    cls: Class, name: str, expected: object, weight: nn.Parameter
) -> None:
    assert getattr(cls([weight]), name) == expected


@pytest.mark.parametrize(
    "cls, name, expected",
    [
        (optim.AdamW, "weight_decay", 0.01),
        (optim.LAMB, "weight_decay", 0.01),
        (optim.LAMB, "lr", 1e-3),
        (optim.RMSprop, "alpha", 0.99),
    ],
)
def test_defaults_of_groups(cls: Class, name: str, expected: float, weight: nn.Parameter) -> None:
    assert cls([weight]).defaults[name] == expected


def test_names_of_parameters_are_kept(weight: nn.Parameter) -> None:
    (group,) = optim.Adam([("layer.weight", weight)]).param_groups

    assert group["param_names"] == ["layer.weight"]


def test_sgd_needs_a_rate(weight: nn.Parameter) -> None:
    with pytest.raises(TypeError):
        optim.SGD([weight])


def test_nesterov_needs_momentum(weight: nn.Parameter) -> None:
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        optim.SGD([weight], lr=0.1, nesterov=True)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.LAMB])
def test_a_beta_is_at_least_0_and_less_than_1(
    cls: Class, betas: tuple[float, float], weight: nn.Parameter
) -> None:
    with pytest.raises(ValueError, match="at least 0 and less than 1") as caught:
        cls([weight], betas=betas)

    assert str(betas) in str(caught.value)


def test_passed_arguments_are_variable_and_defaults_are_constant(weight: nn.Parameter) -> None:
    attributes = optim.Adam([weight], eps=1e-8, loss_scaling=1.0).variable_attrs

    assert isinstance(attributes, optim.VariableAttributes)
    constant = {
        name: attributes.isConstant(name) for name in ("eps", "loss_scaling", "lr", "betas")
    }
    assert constant == {"eps": False, "loss_scaling": False, "lr": True, "betas": True}


def test_settings_of_groups_are_constant(weight: nn.Parameter) -> None:
    attributes = optim.SGD([{"params": [weight], "weight_decay": 0.5}], 0.1).variable_attrs

    assert not attributes.isConstant("lr")
    assert attributes.isConstant("weight_decay")


# The positional order of the 1.x releases.


@pytest.fixture
def _not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next use of the old order be the first of this process."""
    monkeypatch.setattr(arguments, "_warned", set())


@pytest.mark.usefixtures("_not_warned")
@pytest.mark.parametrize("name", OLD)
def test_the_argument_order_of_1x_sets_the_same_values_as_in_1x(
    name: str, weight: nn.Parameter
) -> None:
    args, expected = OLD[name]

    optimizer = getattr(optim, name)([weight], *args)

    group = optimizer.param_groups[0]
    got = {key: group[key] if key in group else getattr(optimizer, key) for key in expected}
    assert got == expected
    assert optimizer.loss_scaling == 128.0
    assert not optimizer.variable_attrs.isConstant("loss_scaling")


@pytest.mark.usefixtures("_not_warned")
@pytest.mark.parametrize("name", OLD)
def test_the_order_of_1x_leaves_todays_arguments_in_its_places_alone(
    name: str, weight: nn.Parameter
) -> None:
    args, _ = OLD[name]

    (group,) = getattr(optim, name)([weight], *args).param_groups

    assert group["maximize"] is False
    assert group["foreach"] is None


@pytest.mark.usefixtures("_not_warned")
@pytest.mark.parametrize("name", OLD)
def test_one_warning_explains_the_argument_order_of_1x(
    name: str, weight: nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    args, _ = OLD[name]

    for _ in range(2):
        getattr(optim, name)([weight], *args)

    (record,) = caplog.records
    assert "128.0 is used as loss_scaling" in record.getMessage()


@pytest.mark.usefixtures("_not_warned")
@pytest.mark.parametrize("name", OLD)
def test_a_scale_in_the_order_of_1x_and_by_name_is_refused(name: str, weight: nn.Parameter) -> None:
    args, _ = OLD[name]

    with pytest.raises(TypeError, match="twice"):
        getattr(optim, name)([weight], *args, loss_scaling=2.0)


@pytest.mark.usefixtures("_not_warned")
def test_the_current_argument_order_causes_no_warning(
    weight: nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    new = optim.SGD([weight], 0.1, 0.9, 0.0, 0.0, False, True, None, None, 2.0)

    assert new.param_groups[0]["maximize"] is True
    assert new.loss_scaling == 2.0
    assert not caplog.records


# Values that are refused.


@pytest.mark.parametrize(
    "name, settings, message, remedy",
    [
        ("SGD", {"lr": "0.1"}, "Expected a number for lr", "pass a number, such as 0.1"),
        ("Adam", {"maximize": 128.0}, "Expected a flag for maximize", "pass True or False"),
        ("RMSprop", {"foreach": 128.0}, "Expected a flag for foreach", "pass True or False"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_the_users_line(
    name: str, settings: dict[str, Any], message: str, remedy: str, weight: nn.Parameter
) -> None:
    with pytest.raises(AssertionError, match=message) as refused:
        getattr(optim, name)([weight], **settings)  # this line

    text, (key, value) = str(refused.value), list(settings.items())[-1]
    assert f"Got:    {name}(..., {key}={value!r})" in text
    assert re.search(r"Where:  test_classes.py:\d+, .*settings\) # this line\n", text)
    assert remedy in text


@pytest.mark.parametrize(
    "value", [1e308, -3.5e38, 10**39, 10**5000, torch.tensor(1e40, dtype=torch.float64)], ids=type
)
def test_a_number_that_float32_cannot_hold_is_refused(value: Any, weight: nn.Parameter) -> None:
    """The device keeps numbers in float32, also those of double weights."""
    double = nn.Parameter(weight.detach().double())

    with pytest.raises(ValueError, match="given for weight_decay is too large") as refused:
        optim.LAMB([double], lr=0.1, weight_decay=value)

    assert "use a number between -3.4e+38 and 3.4e+38" in str(refused.value)


def test_an_infinite_rate_is_taken(weight: nn.Parameter) -> None:
    assert optim.SGD([weight], lr=math.inf).param_groups[0]["lr"] == math.inf


@pytest.mark.spec("optimizers", 26)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.LAMB])
def test_betas_may_be_a_list_as_in_configuration_files(cls: Class, weight: nn.Parameter) -> None:
    assert cls([weight], betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.spec("optimizers", 26)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.LAMB])
@pytest.mark.parametrize("betas", [0.9, (0.9,), [0.9, 0.99, 0.999], "ab", (0.9, "0.99")], ids=str)
def test_betas_that_are_not_a_pair_of_numbers_are_refused(
    cls: Class, betas: Any, weight: nn.Parameter
) -> None:
    with pytest.raises(AssertionError, match="Expected a pair for betas"):
        cls([weight], betas=betas)


@pytest.mark.spec("optimizers", 13)
def test_velocity_scaling_of_the_separate_variant_is_ignored_with_a_warning(
    weight: nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    separate = optim.SGD([weight], lr=0.1, velocity_scaling=4.0)

    assert "value of velocity_scaling is ignored" in caplog.text
    assert "velocity_scaling" not in separate.param_groups[0]
    assert "velocity_scaling" not in separate.defaults


@pytest.mark.spec("optimizers", 13)
def test_velocity_scaling_of_the_combined_variant_may_differ_between_groups(
    weight: nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [{"params": [weight], "velocity_scaling": 2.0}]

    combined = optim.SGD(groups, lr=0.1, velocity_scaling=4.0, use_combined_accum=True)

    assert combined.defaults["velocity_scaling"] == 4.0
    assert combined.param_groups[0]["velocity_scaling"] == 2.0
    assert not caplog.records


# LAMB, which torch does not have.


@pytest.mark.parametrize(
    "settings", [{"lr": 0.1, "max_weight_norm": 0.5}, {"bias_correction": False}]
)
def test_a_native_step_of_lamb_is_its_formula(
    settings: dict[str, Any], weight: nn.Parameter
) -> None:
    optimizer = optim.LAMB([weight], **settings)
    expected, state = {"w": weight.detach().double()}, {}

    for t in range(1, 9):
        gradient = torch.randn(2)
        weight.grad = gradient.clone()
        optimizer.step()
        expected = plain.lamb(expected, {"w": gradient.double()}, state, t, **settings)

    torch.testing.assert_close(weight.detach().double(), expected["w"], **near(2 + FUNCTION, 8))


def test_a_native_step_of_lamb_returns_the_result_of_the_closure(weight: nn.Parameter) -> None:
    weight.grad = torch.ones(2)

    assert optim.LAMB([weight]).step(lambda: 7) == 7


def test_a_native_step_of_lamb_leaves_weights_without_gradient_alone(weight: nn.Parameter) -> None:
    idle = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(2)

    optim.LAMB([weight, idle], lr=0.1).step()

    assert idle.tolist() == [1.0]
