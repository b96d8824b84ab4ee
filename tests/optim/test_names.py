"""``ipu_state`` and ``ipu_param``: documented names and values, there and back."""

import pytest
import torch

import poptorch
from helpers.wrapping import Having, options
from poptorch import optim


def compiled(cls, *args, **settings):
    """An optimizer of this class whose model is compiled for gradients of 1 and 2, the inputs."""
    model = Having(lambda m, x: poptorch.identity_loss((m.weight * x).sum(), "none"),
                   weight=torch.nn.Parameter(torch.zeros(2)))  # fmt: skip
    optimizer = cls(model.parameters(), *args, **settings)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped.compile(torch.tensor([1.0, 2.0]))
    return optimizer, wrapped


@pytest.mark.parametrize("name", ["LAMB", "RMSprop"])
def test_moment_types(name):
    half, single = torch.float16, torch.float32
    optimizer, _ = compiled(getattr(optim, name), first_order_momentum_accum_type=half,
                            second_order_momentum_accum_type=single)  # fmt: skip
    dtypes = {k: v.dtype for k, v in optimizer.state_dict()["ipu_state"].items() if v.dim()}
    adam_like = {"Accl1___weight": half, "Accl2___weight": single}
    assert dtypes == ({"Accl1___weight": single} if name == "RMSprop" else adam_like)


def test_state_of_another_shape_and_weights_that_joined_later(caplog):
    optimizer, wrapped = compiled(optim.Adam, lr=0.1)
    saved = optimizer.state_dict()
    wrong = {**saved["ipu_state"], "Accl1___weight": torch.ones(3)}
    optimizer.load_state_dict({**saved, "ipu_state": wrong})
    with pytest.raises(RuntimeError, match="wrong shape"):
        wrapped(torch.ones(2))

    model = torch.nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options(), optimizer, loss=torch.nn.MSELoss())
    wrapped(torch.ones(1, 2), torch.ones(1, 1))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Step___weight"] += 3
    optimizer.load_state_dict(saved)
    wrapped(torch.ones(1, 2), torch.ones(1, 1))
    assert "fewer steps than the others (bias: 1 instead of 4)" in caplog.text


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
            "learningRate": 0.5, "weightDecay": 0.0, "adamBeta1": 0.25, "adamBeta2": 0.75,
            "adamEps": 0.125, "lossScaling_FLOAT": 1.0,
        },
    ),
    ((optim.LAMB, {"lr": 0.1, "max_weight_norm": 2.0}), {"maxWeightNorm": 2.0, "adamEps": EPS}),
    ((optim.RMSprop, {"lr": 0.1, "alpha": 0.75, "momentum": 0.5}),
     {"adaptiveAlpha": 0.75, "adaptiveMomentum": 0.5}),
    ((optim.SGD, {"lr": 0.5, "momentum": 0.25, "loss_scaling": 2.0}),
     {"scaledLearningRate2": 0.25, "scaledMomentum2": 0.25}),
    ((optim.SGD, {"lr": 0.5, "use_combined_accum": True, "velocity_scaling": 4.0}),
     {"scaledLearningRate1": 0.125}),
]  # fmt: skip


def numbers(optimizer):
    shown = optimizer.state_dict()["ipu_param"]
    assert all(value.dtype == torch.float32 and not value.dim() for value in shown.values())
    return {name.removesuffix("___specific___weight"): float(v) for name, v in shown.items()}


@pytest.mark.parametrize(("made", "wanted"), PARAMS)
def test_parameters_have_documented_values_and_are_taken_over(made, wanted):
    """What was passed is variable, loaded values too, and reads back; the rest is constant."""
    cls, settings = made
    optimizer, _ = compiled(cls, **settings)
    found = numbers(optimizer)
    assert {name: found[name] for name in wanted} == wanted
    saved, half = optimizer.state_dict(), {**settings, "lr": settings["lr"] / 4}
    if "adamEps" in wanted and "eps" not in settings:
        saved["ipu_param"]["adamEps___specific___weight"] = torch.tensor(0.5)
    other, wrapped = compiled(cls, **half)
    assert numbers(other) != found
    other.load_state_dict(saved)
    wrapped(torch.ones(2))
    assert numbers(other) == found


@pytest.mark.parametrize("loaded", [torch.tensor(1e308, dtype=torch.float64), torch.ones(2)])
def test_a_loaded_number_that_float32_cannot_hold_is_refused(loaded):
    optimizer, wrapped = compiled(optim.SGD, lr=0.5, loss_scaling=2.0)
    saved = optimizer.state_dict()
    saved["ipu_param"]["lossScaling_FLOAT"] = loaded
    optimizer.load_state_dict(saved)
    with pytest.raises(poptorch.Error, match="loss_scaling"):
        wrapped(torch.ones(2))
