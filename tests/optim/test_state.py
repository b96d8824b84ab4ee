"""State of optimizers: copies, and names and values in ``state_dict()``."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options
from poptorch import optim

F16 = torch.float16

Optimizer = torch.optim.Optimizer
Class = type[Optimizer]

# Copies.

each_copy = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["copy", "deepcopy", "pickle"],
)
SCALES = {"loss_scaling": 8.0, "velocity_scaling": 4.0, "use_combined_accum": True}


@pytest.fixture
def scaled() -> optim.SGD:
    """Return an optimizer with settings that torch does not know, one of them variable."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = optim.SGD([weight], 0.1, **SCALES)
    optimizer.variable_attrs.markAsVariable("momentum")
    return optimizer


@pytest.mark.spec("optimizers", 30)
@each_copy
def test_copies_keep_the_attributes_that_torch_does_not_have(
    scaled: optim.SGD, copied: Callable[[Any], Any]
) -> None:
    other = copied(scaled)

    assert {name: getattr(other, name) for name in SCALES} == SCALES
    assert other.param_groups[0]["velocity_scaling"] == 4.0
    assert not other.variable_attrs.isConstant("momentum")


@pytest.mark.spec("optimizers", 30)
def test_a_shallow_copy_has_the_same_weights(scaled: optim.SGD) -> None:
    (weight,) = scaled.param_groups[0]["params"]

    assert copy.copy(scaled).param_groups[0]["params"][0] is weight


@pytest.mark.spec("optimizers", 30)
@each_copy
def test_changes_of_a_copy_do_not_change_the_original(
    scaled: optim.SGD, copied: Callable[[Any], Any]
) -> None:
    other = copied(scaled)

    other.param_groups[0]["lr"] = 0.5
    other.variable_attrs.markAsConstant("momentum")

    assert scaled.param_groups[0]["lr"] == 0.1
    assert not scaled.variable_attrs.isConstant("momentum")


@pytest.mark.spec("optimizers", 30)
@each_copy
def test_a_copy_of_an_optimizer_without_state_has_none_to_upload(
    scaled: optim.SGD, copied: Callable[[Any], Any]
) -> None:
    other = copied(scaled)

    assert not other.has_state()
    assert not other.ipu_state_is_dirty


@pytest.mark.spec("optimizers", 30)
@each_copy
def test_a_copy_of_an_optimizer_with_state_has_to_upload_it(
    scaled: optim.SGD, copied: Callable[[Any], Any]
) -> None:
    scaled.set_state_dict({"ipu_state": {"Accl1___w": torch.ones(2)}, "ipu_param": {}})
    scaled.ipu_state_is_dirty = False

    other = copied(scaled)

    assert other.ipu_state_is_dirty
    assert other.state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]


# Moments.


def compiled(cls: Class, *args: Any, **settings: Any) -> tuple[Optimizer, poptorch.PoplarExecutor]:
    """Return an optimizer whose model is compiled, and its executor.

    The gradients are the inputs, which are 1 and 2.
    """
    model = Having(
        lambda m, x: poptorch.identity_loss((m.weight * x).sum(), "none"),
        weight=torch.nn.Parameter(torch.zeros(2)),
    )
    optimizer = cls(model.parameters(), *args, **settings)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped.compile(torch.tensor([1.0, 2.0]))
    return optimizer, wrapped


@pytest.mark.parametrize(
    "cls, expected",
    [
        (optim.LAMB, {"Accl1___weight": F16, "Accl2___weight": torch.float32}),
        (optim.RMSprop, {"Accl1___weight": torch.float32}),
    ],
)
def test_moments_have_the_types_that_are_asked_for(
    cls: Class, expected: dict[str, torch.dtype]
) -> None:
    """RMSprop without momentum has only moments of squares, which are of second order."""
    optimizer, _ = compiled(
        cls,
        first_order_momentum_accum_type=F16,
        second_order_momentum_accum_type=torch.float32,
    )

    moments = {k: v for k, v in optimizer.state_dict()["ipu_state"].items() if v.dim()}

    assert {name: value.dtype for name, value in moments.items()} == expected


def test_a_loaded_moment_of_another_shape_is_refused() -> None:
    optimizer, wrapped = compiled(optim.Adam, lr=0.1)
    saved = optimizer.state_dict()
    wrong = {**saved["ipu_state"], "Accl1___weight": torch.ones(3)}

    optimizer.load_state_dict({**saved, "ipu_state": wrong})

    with pytest.raises(RuntimeError, match="wrong shape"):
        wrapped(torch.ones(2))


def test_a_weight_that_has_made_fewer_steps_than_others_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options(), optimizer, loss=torch.nn.MSELoss())
    wrapped(torch.ones(1, 2), torch.ones(1, 1))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Step___weight"] += 3

    optimizer.load_state_dict(saved)
    wrapped(torch.ones(1, 2), torch.ones(1, 1))

    assert "fewer steps than others (bias: 1 instead of 4)" in caplog.text


# Numbers.

EPS = pytest.approx(1e-8)
PARAMS = [
    (
        (optim.SGD, {"lr": 0.5, "dampening": 0.25, "weight_decay": 0.125, "loss_scaling": 4.0}),
        {
            "scaledLearningRate0": 0.5 * 0.75 / 4,
            "weightDecayScaleFactor0": 1 - 0.5 * 0.75 * 0.125,
            "lossScaling_FLOAT": 4.0,
        },
    ),
    (
        (optim.Adam, {"lr": 0.5, "betas": (0.25, 0.75), "eps": 0.125}),
        {
            "learningRate": 0.5,
            "weightDecay": 0.0,
            "adamBeta1": 0.25,
            "adamBeta2": 0.75,
            "adamEps": 0.125,
            "lossScaling_FLOAT": 1.0,
        },
    ),
    ((optim.LAMB, {"lr": 0.1, "max_weight_norm": 2.0}), {"maxWeightNorm": 2.0, "adamEps": EPS}),
    (
        (optim.RMSprop, {"lr": 0.1, "alpha": 0.75, "momentum": 0.5}),
        {"adaptiveAlpha": 0.75, "adaptiveMomentum": 0.5},
    ),
    (
        (optim.SGD, {"lr": 0.5, "momentum": 0.25, "loss_scaling": 2.0}),
        {"scaledLearningRate2": 0.25, "scaledMomentum2": 0.25},
    ),
    (
        (optim.SGD, {"lr": 0.5, "use_combined_accum": True, "velocity_scaling": 4.0}),
        {"scaledLearningRate1": 0.125},
    ),
]


def numbers(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers of a compiled optimizer by name."""
    shown = optimizer.state_dict()["ipu_param"]
    return {name.removesuffix("___specific___weight"): float(v) for name, v in shown.items()}


@pytest.mark.parametrize("made, expected", PARAMS)
def test_numbers_have_their_documented_names_and_values(
    made: tuple[Class, dict[str, Any]], expected: dict[str, float]
) -> None:
    cls, settings = made

    optimizer, _ = compiled(cls, **settings)

    found = numbers(optimizer)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("made, expected", PARAMS)
def test_numbers_are_single_values_in_float32(
    made: tuple[Class, dict[str, Any]], expected: dict[str, float]
) -> None:
    cls, settings = made

    optimizer, _ = compiled(cls, **settings)

    for value in optimizer.state_dict()["ipu_param"].values():
        assert value.dtype == torch.float32
        assert value.dim() == 0


@pytest.mark.parametrize("made, expected", PARAMS)
def test_loaded_numbers_are_taken_over_unless_they_are_constant(
    made: tuple[Class, dict[str, Any]], expected: dict[str, float]
) -> None:
    """Values that were passed or loaded are variable and can be read back; the others are
    constant.
    """
    cls, settings = made
    optimizer, _ = compiled(cls, **settings)
    found = numbers(optimizer)
    saved = optimizer.state_dict()
    if "adamEps" in expected and "eps" not in settings:  # which is constant
        saved["ipu_param"]["adamEps___specific___weight"] = torch.tensor(0.5)
    other, wrapped = compiled(cls, **{**settings, "lr": settings["lr"] / 4})
    assert numbers(other) != found

    other.load_state_dict(saved)
    wrapped(torch.ones(2))

    assert numbers(other) == found


@pytest.mark.parametrize("loaded", [torch.tensor(1e308, dtype=torch.float64), torch.ones(2)])
def test_a_loaded_number_that_float32_cannot_hold_is_refused(loaded: torch.Tensor) -> None:
    optimizer, wrapped = compiled(optim.SGD, lr=0.5, loss_scaling=2.0)
    saved = optimizer.state_dict()
    saved["ipu_param"]["lossScaling_FLOAT"] = loaded

    optimizer.load_state_dict(saved)

    with pytest.raises(poptorch.Error, match="loss_scaling"):
        wrapped(torch.ones(2))
