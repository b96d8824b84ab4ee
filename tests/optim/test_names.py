"""ipu_state and ipu_param: documented names and values, there and back."""

import pytest
import torch

from helpers.updating import Training
from poptorch import optim
from poptorch.optim.freeze import freeze
from poptorch.optim.names import (
    from_ipu_param,
    from_ipu_state,
    state_keys,
    to_ipu_param,
    to_ipu_state,
)

PATH = "lin.weight"


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.zeros(2))


def frozen(optimizer, weight):
    return freeze(optimizer, {weight.data_ptr(): PATH})


MAKERS = {
    "sgd": (lambda w: optim.SGD([w], 0.1), []),
    "momentum": (lambda w: optim.SGD([w], 0.1, momentum=0.5), ["Accl1"]),
    "combined": (lambda w: optim.SGD([w], 0.1, use_combined_accum=True), ["Accl"]),
    "combined, decay": (
        lambda w: optim.SGD([w], 0.1, weight_decay=0.1, use_combined_accum=True),
        ["Accl", "Step"],
    ),
    "adam": (lambda w: optim.Adam([w]), ["Accl1", "Accl2", "Step"]),
    "adamw": (lambda w: optim.AdamW([w]), ["Accl1", "Accl2", "Step"]),
    "lamb": (lambda w: optim.LAMB([w]), ["Accl1", "Accl2", "Step"]),
    "uncorrected": (lambda w: optim.LAMB([w], bias_correction=False), ["Accl1", "Accl2"]),
    "rmsprop": (lambda w: optim.RMSprop([w]), ["Accl1"]),
    "rmsprop all": (
        lambda w: optim.RMSprop([w], momentum=0.5, centered=True),
        ["Accl1", "Accl2", "Accl3"],
    ),
}


@pytest.mark.parametrize("make, prefixes", MAKERS.values(), ids=MAKERS)
def test_state_names(make, prefixes, weight):
    ours = Training(make(weight), {PATH: weight})
    # Momentum passed as a variable keeps its dampening constant: no step is counted.
    ours.step({PATH: torch.tensor([1.0, 2.0])})
    shown = to_ipu_state(ours.spec, ours.tensors)
    assert sorted(shown) == [f"{prefix}___{PATH}" for prefix in prefixes]
    for name, value in shown.items():
        assert torch.equal(value, ours.tensors[state_keys(ours.spec)[name]])
        value += 1
        assert not torch.equal(value, ours.tensors[state_keys(ours.spec)[name]])
    back = from_ipu_state(ours.spec, ours.tensors, shown)
    assert set(back) == {key for key in ours.tensors if key.startswith("optstate")}


def test_partial_and_foreign_state(weight, caplog):
    ours = Training(optim.Adam([weight]), {PATH: weight})
    state = {f"Accl1___{PATH}": torch.ones(2), "Accl1___other": torch.ones(7), "x": None}
    found = from_ipu_state(ours.spec, ours.tensors, state)
    assert [*found] == [f"optstate.first.{PATH}"]
    (record,) = caplog.records
    assert f"Accl2___{PATH}, Step___{PATH}" in record.getMessage()


def test_weights_that_joined_later_are_said(weight, caplog):
    other = torch.nn.Parameter(torch.zeros(2))
    ours = Training(optim.Adam([weight, other]), {PATH: weight, "other": other})
    state = to_ipu_state(ours.spec, ours.tensors)
    from_ipu_state(ours.spec, ours.tensors, state)
    assert not caplog.records
    state[f"Step___{PATH}"] += 3
    from_ipu_state(ours.spec, ours.tensors, state)
    assert "fewer steps than the others (other: 0 instead of 3)" in caplog.text


def test_state_of_another_shape_is_refused(weight):
    ours = Training(optim.Adam([weight]), {PATH: weight})
    with pytest.raises(RuntimeError, match="wrong shape"):
        from_ipu_state(ours.spec, ours.tensors, {f"Accl1___{PATH}": torch.ones(3)})


def values_of(optimizer, weight):
    spec, values = frozen(optimizer, weight)
    shown = to_ipu_param(spec, values)
    assert all(v.dtype == torch.float32 and not v.dim() for v in shown.values())
    return {k.removesuffix(f"___specific___{PATH}"): float(v) for k, v in shown.items()}


def test_parameter_values(weight):
    simple = optim.SGD([weight], lr=0.5, dampening=0.25, weight_decay=0.125, loss_scaling=4.0)
    assert values_of(simple, weight) == {
        "scaledLearningRate0": 0.5 * 0.75 / 4,
        "weightDecayScaleFactor0": 1 - 0.5 * 0.75 * 0.125,
        "lossScaling_FLOAT": 4.0,
    }
    adam = optim.Adam([weight], lr=0.5, betas=(0.25, 0.75), eps=0.125)
    assert values_of(adam, weight) == {
        "learningRate": 0.5,
        "weightDecay": 0.0,
        "adamBeta1": 0.25,
        "adamBeta2": 0.75,
        "adamEps": 0.125,
        "lossScaling_FLOAT": 1.0,
    }
    assert values_of(optim.LAMB([weight], max_weight_norm=2.0), weight)["maxWeightNorm"] == 2.0
    rmsprop = values_of(optim.RMSprop([weight], alpha=0.75, momentum=0.5), weight)
    assert (rmsprop["adaptiveAlpha"], rmsprop["adaptiveMomentum"]) == (0.75, 0.5)
    separate = values_of(optim.SGD([weight], 0.5, momentum=0.25, loss_scaling=2.0), weight)
    assert (separate["scaledLearningRate2"], separate["scaledMomentum2"]) == (0.25, 0.25)
    combined = optim.SGD([weight], 0.5, use_combined_accum=True, velocity_scaling=4.0)
    assert values_of(combined, weight)["scaledLearningRate1"] == 0.125


SETTINGS = [
    (optim.SGD, {"lr": 0.1, "dampening": 0.3, "weight_decay": 0.07, "loss_scaling": 3.0}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.07}),
    (optim.SGD, {"lr": 0.1, "use_combined_accum": True, "velocity_scaling": 3.0}),
    (optim.Adam, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-7}),
    (optim.LAMB, {"lr": 0.1, "max_weight_norm": 3.3, "weight_decay": 0.01}),
    (optim.RMSprop, {"lr": 0.1, "alpha": 0.97, "momentum": 0.3}),
]


@pytest.mark.parametrize("cls, settings", SETTINGS)
def test_values_pass_a_checkpoint_unrounded(cls, settings, weight):
    spec, values = frozen(cls([weight], **settings), weight)
    assert from_ipu_param(spec, values, to_ipu_param(spec, values)) == values
    assert from_ipu_param(spec, values, {}) == values


@pytest.mark.parametrize("cls, settings", SETTINGS)
def test_other_values_are_taken_over(cls, settings, weight):
    spec, values = frozen(cls([weight], **settings), weight)
    # Momentum and the velocity's scale do not double; simple SGD does not show its dampening.
    fixed = {"hyper.0.velocity_scaling", "hyper.0.momentum"}
    fixed |= set() if "momentum" in settings else {"hyper.0.dampening"}
    changed = {
        name: value * (0.5 if "one_minus" in name or "dampening" in name else 2)
        for name, value in values.items()
    }
    changed |= {name: value for name, value in values.items() if name in fixed}
    got = from_ipu_param(spec, values, to_ipu_param(spec, changed))
    assert got == pytest.approx(changed, rel=1e-4)


def test_constants_stay(weight):
    spec, values = frozen(optim.Adam([weight], lr=0.1), weight)
    loaded = {f"adamEps___specific___{PATH}": torch.tensor(0.5)}
    loaded[f"learningRate___specific___{PATH}"] = torch.tensor(0.5)
    assert from_ipu_param(spec, values, loaded) == {"hyper.0.lr": 0.5}
