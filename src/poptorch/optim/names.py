"""Convert between the keys of slots and the names in ``ipu_state`` and ``ipu_param`` that
users see.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping

import torch

from .._base import log
from .._base.errors import StateError
from .._ir import slots
from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from . import KINDS
from .arguments import number
from .kind import Hypers, Shown, shown_directly

STEPPED = "stepped"
_KINDS = {kind.algorithm: kind for kind in KINDS}


def state_keys(spec: OptimSpec) -> dict[str, str]:
    """Return the documented names of state with their keys. All weights share one counter, so all
    ``Step___`` names have the same key.
    """
    keys = {"lossScaleUpdateFactor": slots.LOSS_SCALE_FACTOR.key}
    if spec.traced is not None:
        keys |= {
            f"{kept.leaf.name}___{kept.owner}": kept.slot.key for kept in spec.traced.kept or ()
        }
        return {**keys, STEPPED: slots.STEPPED.key}
    for path in (path for group in spec.groups for path in group.params):
        weight = slots.param(path, (), torch.float32)  # shape and dtype are not parts of keys
        for prefix, moment in _KINDS[spec.algorithm].moments.items():
            keys[f"{prefix}___{path}"] = slots.moment(moment, weight, weight.dtype).key
        keys[f"Step___{path}"] = slots.STEP.key
    return keys


def to_ipu_state(
    spec: OptimSpec, tensors: Mapping[str, torch.Tensor], traced: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return ``ipu_state``. Tensors in ``own`` are copied only if several names refer to the same
    one.
    """
    keys = state_keys(spec)
    names = collections.Counter(keys.values())
    values = {name: tensors[key].detach() for name, key in keys.items() if key in tensors}
    return {
        name: value if keys[name] in traced and names[keys[name]] == 1 else value.clone()
        for name, value in values.items()
    }


def from_ipu_state(
    spec: OptimSpec, tensors: Mapping[str, Slot | torch.Tensor], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the state to load. Unknown names are ignored; for missing names it warns, and the
    device keeps its values.
    """
    loaded: dict[str, torch.Tensor] = {}
    ages: dict[str, float] = {}
    missing = []
    keys = state_keys(spec)
    for name, key in keys.items():
        if key not in tensors:
            continue
        if name not in state:
            missing.append(name)
            continue
        value = torch.as_tensor(state[name]).detach()
        if tuple(value.shape) != tuple(tensors[key].shape):
            raise StateError(
                f"The loaded optimizer state {name!r} has the wrong shape",
                got=(
                    f"the file has the shape {tuple(value.shape)}; the model needs "
                    f"{tuple(tensors[key].shape)}"
                ),
                fix=(
                    "load a state of a model with the same shapes; to load only the parameter "
                    'groups, set "ipu_state" and "ipu_param" to None'
                ),
            )
        # Weights that were added later have smaller counts. The shared counter follows the oldest
        # weight.
        loaded[key] = torch.maximum(loaded[key], value) if key in loaded else value
        prefix, _, path = name.partition("___")
        if prefix.lower() == "step" and _is_trained(spec, keys, path, tensors):
            ages[path] = float(value)
    oldest = max(ages.values(), default=0.0)
    younger = [path for path, age in ages.items() if age < oldest]
    if younger:
        log.python.warning(
            (
                "Some weights have made fewer steps than others (%s: %g instead of %g). The bias "
                "correction uses the largest number of steps for all weights, so the first steps "
                "of these weights are larger than in PyTorch. To restart the count for all "
                "weights, call destroy() and pass a new optimizer to setOptimizer"
            ),
            ", ".join(younger[:5]) + (", ..." if len(younger) > 5 else ""),
            ages[younger[0]],
            oldest,
        )
    if missing:
        log.python.warning(
            "The loaded optimizer state does not contain %s, so the device keeps its values",
            ", ".join(missing),
        )
    return loaded


def _is_trained(
    spec: OptimSpec, keys: Mapping[str, str], path: str, tensors: Collection[str]
) -> bool:
    """Return whether the device has state for a weight. A weight may be only in the optimizer."""
    if spec.traced is not None:
        return True
    first, *_ = _KINDS[spec.algorithm].moments
    return keys[f"{first}___{path}"] in tensors


def _hypers(spec: OptimSpec, values: Mapping[str, float], index: int) -> dict[str, float]:
    group = spec.groups[index]
    hypers = {"loss_scaling": values.get(slots.LOSS_SCALING.key, 1.0)}
    for name, value in (*spec.settings, *group.settings):
        if isinstance(value, int | float):
            hypers[name] = float(value)
    for name in group.variables:
        hypers[name] = slots.hyper_value(name, values[slots.hyper(name, index).key])
    return hypers


def to_ipu_param(spec: OptimSpec, values: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(shown.show(hypers), dtype=torch.float32)
        for name, shown, hypers, _ in _entries(spec, values)
    }


def from_ipu_param(
    spec: OptimSpec, values: Mapping[str, float], param: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the values of variable hyper-parameters after loading an ``ipu_param``.

    A value that already reads as the loaded one stays, so a checkpoint that does not change it does
    not round it. The first weight of a group determines the values of the group.
    """
    result = dict(values)
    settled: set[str] = set()
    for name, shown, _, index in _entries(spec, values):
        key = slots.hyper(shown.hyper, index).key
        if name not in param or key not in result or key in settled:
            continue
        settled.add(key)
        hypers = _hypers(spec, result, max(index, 0))
        loaded = number("loss_scaling" if key == slots.LOSS_SCALING.key else name, param[name])
        taken = shown.read(loaded, hypers)
        current = torch.tensor(shown.show(hypers), dtype=torch.float32)
        if taken is not None and loaded != float(current):
            result[key] = slots.hyper_value(shown.hyper, taken)
    return result


def _entries(
    spec: OptimSpec, values: Mapping[str, float]
) -> Iterator[tuple[str, Shown, Hypers, int]]:
    scaling = values.get(slots.LOSS_SCALING.key, spec.loss_scaling)
    traced = {"loss_scaling": scaling} if spec.traced is not None else _hypers(spec, values, 0)
    yield "lossScaling_FLOAT", shown_directly("", "loss_scaling"), traced, -1
    if spec.traced is not None:
        return
    for index, group in enumerate(spec.groups):
        hypers = _hypers(spec, values, index)
        for shown in _KINDS[spec.algorithm].shown(dict(group.settings)):
            for path in group.params:
                yield f"{shown.name}___specific___{path}", shown, hypers, index
