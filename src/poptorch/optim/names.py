"""The names and values by which users see device state: ``ipu_state`` and ``ipu_param``.

Pure translations between these dictionaries and the keys of the program's slots, in both
directions. Source: PopTorch user guide, "Optimizers".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .._base import log
from .._base.errors import StateError
from .._ir import slots
from .._ir.optim_spec import OptimGroup, OptimSpec
from .._ir.slots import Slot
from .numbers import number

_Hypers = dict[str, float]

_PREFIXES = {
    "sgd": {"velocity": "Accl1"},
    "sgd_combined": {"combined": "Accl"},
    "adam": {"first": "Accl1", "second": "Accl2"},
    "adamw": {"first": "Accl1", "second": "Accl2"},
    "lamb": {"first": "Accl1", "second": "Accl2"},
    "rmsprop": {"square": "Accl1", "mean": "Accl2", "momentum": "Accl3"},
}


def state_keys(spec: OptimSpec) -> dict[str, str]:
    """Return the documented name of every state tensor that there may be, to its key.

    One counter serves all weights, so that all ``Step___`` names lead to the same key.
    """
    keys = {"lossScaleUpdateFactor": slots.LOSS_SCALE_FACTOR.key}
    for path in (path for group in spec.groups for path in group.params):
        weight = slots.param(path, (), torch.float32)  # neither is a part of keys
        for moment, prefix in _PREFIXES[spec.algorithm].items():
            keys[f"{prefix}___{path}"] = slots.moment(moment, weight, weight.dtype).key
        keys[f"Step___{path}"] = slots.STEP.key
    return keys


def to_ipu_state(spec: OptimSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the device's state on the host, by documented name."""
    return {
        name: tensors[key].detach().clone().cpu()
        for name, key in state_keys(spec).items()
        if key in tensors
    }


def from_ipu_state(
    spec: OptimSpec,
    tensors: Mapping[str, Slot | torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return what a loaded ``ipu_state`` puts into the device's state, by key.

    Names that mean nothing to this optimizer are ignored. For state that is missing a warning is
    logged, and the device's value stays.

    Raises:
        RuntimeError: a tensor has another shape than the state it is for.
    """
    loaded: dict[str, torch.Tensor] = {}
    missing = []
    for name, key in state_keys(spec).items():
        if key not in tensors:
            continue
        if name not in state:
            missing.append(name)
            continue
        value = torch.as_tensor(state[name]).detach()
        if tuple(value.shape) != tuple(tensors[key].shape):
            raise StateError(
                f"The loaded optimizer state {name!r} has the wrong shape",
                got=f"{tuple(value.shape)}; the model needs {tuple(tensors[key].shape)}",
            )
        # Weights that joined later were counted less; the shared counter follows the oldest.
        loaded[key] = torch.maximum(loaded[key], value) if key in loaded else value
    _say_ages(spec, tensors, state)
    if missing:
        log.python.warning(
            "The loaded optimizer state lacks %s: the device's values stay", ", ".join(missing)
        )
    return loaded


def _say_ages(
    spec: OptimSpec,
    tensors: Mapping[str, Slot | torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Warn of weights that have made fewer steps than others: one counter serves all."""
    if slots.STEP.key not in tensors:
        return
    keys, ages = state_keys(spec), {}
    for path in (path for group in spec.groups for path in group.params):
        if f"Step___{path}" in state and keys[f"Accl1___{path}"] in tensors:
            ages[path] = float(state[f"Step___{path}"])
    oldest = max(ages.values(), default=0.0)
    younger = [path for path, age in ages.items() if age < oldest]
    if younger:
        log.python.warning(
            "Weights have made fewer steps than the others (%s: %g instead of %g), and the moments "
            "of all are corrected for the most: the first steps of these are longer than torch's. "
            "Give setOptimizer a new optimizer after destroy(), so that all start anew",
            ", ".join(younger[:5]) + (", ..." if len(younger) > 5 else ""),
            ages[younger[0]],
            oldest,
        )


@dataclass(frozen=True)
class _Shown:
    """One entry of ``ipu_param`` per weight: how it is computed from the group's hyper-parameters.

    Attributes:
        name: the documented name.
        hyper: the hyper-parameter that a loaded value determines.
        show: hyper-parameters to value.
        take: value and hyper-parameters to the hyper-parameter; None if it cannot be told.
    """

    name: str
    hyper: str
    show: Callable[[_Hypers], float]
    take: Callable[[float, _Hypers], float | None]


def _plain(name: str, hyper: str) -> _Shown:
    return _Shown(name, hyper, lambda h: h[hyper], lambda value, h: value)


def _ratio(value: float, divisor: float) -> float | None:
    return value / divisor if divisor else None


_ADAM = (
    _plain("learningRate", "lr"),
    _plain("weightDecay", "weight_decay"),
    _plain("adamBeta1", "beta1"),
    _plain("adamBeta2", "beta2"),
    _plain("adamEps", "eps"),
)
_RMSPROP = (
    _plain("learningRate", "lr"),
    _plain("weightDecay", "weight_decay"),
    _plain("adaptiveAlpha", "alpha"),
    _plain("adaptiveEps", "eps"),
    _plain("adaptiveMomentum", "momentum"),
)
_SGD_SIMPLE = (
    _Shown(
        "scaledLearningRate0",
        "lr",
        lambda h: h["lr"] * (1 - h["dampening"]) / h["loss_scaling"],
        lambda value, h: _ratio(value * h["loss_scaling"], 1 - h["dampening"]),
    ),
    _Shown(
        "weightDecayScaleFactor0",
        "weight_decay",
        lambda h: 1 - h["lr"] * (1 - h["dampening"]) * h["weight_decay"],
        lambda value, h: _ratio(1 - value, h["lr"] * (1 - h["dampening"])),
    ),
)


def _sgd_momentum(number: int, scaling: str) -> tuple[_Shown, ...]:
    return (
        _Shown(
            f"scaledLearningRate{number}",
            "lr",
            lambda h: h["lr"] / h[scaling],
            lambda value, h: value * h[scaling],
        ),
        _plain(f"scaledMomentum{number}", "momentum"),
        _Shown(
            f"dampeningScaleFactor{number}",
            "dampening",
            lambda h: (1 - h["dampening"]) * h[scaling] / h["loss_scaling"],
            lambda value, h: 1 - value * h["loss_scaling"] / h[scaling],
        ),
        _Shown(
            f"scaledWeightDecay{number}",
            "weight_decay",
            lambda h: (1 - h["dampening"]) * h[scaling] * h["weight_decay"],
            lambda value, h: _ratio(value, (1 - h["dampening"]) * h[scaling]),
        ),
    )


def _shown(spec: OptimSpec, group: OptimGroup) -> tuple[_Shown, ...]:
    if spec.algorithm == "sgd_combined":
        return _sgd_momentum(1, "velocity_scaling")
    if spec.algorithm == "sgd":
        simple = dict(group.settings).get("momentum") == 0
        return _SGD_SIMPLE if simple else _sgd_momentum(2, "loss_scaling")
    if spec.algorithm == "rmsprop":
        return _RMSPROP
    lamb = (_plain("maxWeightNorm", "max_weight_norm"),)
    return _ADAM + lamb if spec.algorithm == "lamb" else _ADAM


def _hypers(spec: OptimSpec, values: Mapping[str, float], index: int) -> _Hypers:
    """All hyper-parameters of a group as plain numbers, decay rates included."""
    group = spec.groups[index]
    hypers = {"loss_scaling": values.get(slots.LOSS_SCALING.key, 1.0)}
    for name, value in (*spec.settings, *group.settings):
        if isinstance(value, int | float):
            hypers[name] = float(value)
    for name in group.variables:
        hypers[name] = slots.hyper_value(name, values[slots.hyper(name, index).key])
    return hypers


def to_ipu_param(spec: OptimSpec, values: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return the hyper-parameters as 0-d float32 tensors, by documented name."""
    shown_values = {
        name: torch.tensor(shown.show(hypers), dtype=torch.float32)
        for name, shown, hypers, _ in _entries(spec, values)
    }
    scaling = dict(spec.settings).get("loss_scaling", values.get(slots.LOSS_SCALING.key))
    shown_values["lossScaling_FLOAT"] = torch.tensor(scaling, dtype=torch.float32)
    return shown_values


def from_ipu_param(
    spec: OptimSpec, values: Mapping[str, float], param: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the values of variable hyper-parameters after loading an ``ipu_param``.

    Constants stay, being compiled in, and so does what reads the same as what was loaded: a value
    that goes through a checkpoint unchanged is not rounded. The first weight of a group speaks for
    the group.

    Raises:
        AssertionError: one is no number.
        ValueError: float32 cannot hold one.
    """
    result = dict(values)
    name = "lossScaling_FLOAT"
    scaling = values.get(slots.LOSS_SCALING.key)
    if name in param and scaling is not None:
        loaded = number("loss_scaling", param[name])
        if _differs(loaded, scaling):
            result[slots.LOSS_SCALING.key] = loaded
    settled: set[tuple[int, str]] = set()
    for name, shown, _, index in _entries(spec, values):
        if name not in param or (index, shown.hyper) in settled:
            continue
        settled.add((index, shown.hyper))
        hypers = _hypers(spec, result, index)
        loaded = number(name, param[name])
        taken = shown.take(loaded, hypers)
        if taken is None or not _differs(loaded, shown.show(hypers)):
            continue
        key = slots.hyper(shown.hyper, index).key
        if key in result:
            result[key] = slots.hyper_value(shown.hyper, taken)
    return result


def _differs(loaded: float, current: float) -> bool:
    return loaded != float(torch.tensor(current, dtype=torch.float32))


def _entries(
    spec: OptimSpec, values: Mapping[str, float]
) -> Iterator[tuple[str, _Shown, _Hypers, int]]:
    for index, group in enumerate(spec.groups):
        hypers = _hypers(spec, values, index)
        for shown in _shown(spec, group):
            for path in group.params:
                yield f"{shown.name}___specific___{path}", shown, hypers, index
