"""OptimSpec -> the update as a SlotFunction: one optimizer step over every trained weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.optim_spec import OptimGroup, OptimSpec
from .._ir.slot import Slot
from .._ir.slot_function import SlotFunction
from .algorithm import Algorithm, Moment, Scalar, Scalars, is_constant, materialised, of_name
from .rounding import Stores

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _Weight:
    slot: Slot
    gradient: Slot
    moments: tuple[tuple[Moment, Slot], ...]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Arithmetic inside one update is float32, whatever the storage (or float64 for such)."""
        return torch.promote_types(self.slot.dtype, torch.float32)


@dataclass(frozen=True)
class _Group:
    algorithm: Algorithm
    group: OptimGroup
    constants: Scalars
    variables: tuple[Slot, ...]
    weights: tuple[_Weight, ...]
    counts: bool


def lower(
    spec: OptimSpec,
    params: Sequence[Slot],
    gradient_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
) -> SlotFunction:
    """Return the update as a pure function between slots.

    Args:
        spec: the optimizer.
        params: the parameters that have a gradient. Those in no group are left alone, and so are
            paths of groups that are not among them.
        gradient_dtype: element type of ``gradient.*``; None for that of each parameter.
        stochastic_rounding: round weights and moments that are stored in half at random; the
            function then advances ``rng.rounding``, a 0-d int64 that starts at the seed.

    Returns:
        A function from ``param.*``, ``gradient.*``, ``optstate.*`` and ``hyper.*`` (0-d float32) to
        the new ``param.*`` and ``optstate.*``.
    """
    by_path = {param.path: param for param in params}
    groups = [_group(spec, i, g, by_path, gradient_dtype) for i, g in enumerate(spec.groups)]
    counts = any(group.counts for group in groups)
    inputs: list[Slot] = []
    outputs: list[Slot] = [slots.STEP] if counts else []
    initial: dict[str, float] = {}
    for group in groups:
        for weight in group.weights:
            moments = [slot for _, slot in weight.moments]
            inputs += [weight.gradient]
            outputs += [weight.slot, *moments]
            initial |= {s.key: m.initial for m, s in weight.moments if m.initial}
    if stochastic_rounding and any(slot.dtype.itemsize == 2 for slot in outputs):
        outputs.append(slots.ROUNDING)
    hypers = {slot.key: slot for g in groups if g.weights for slot in g.variables}
    inputs = [*outputs, *inputs, *(hypers[key] for key in sorted(hypers))]
    return SlotFunction(
        "update", _function(spec, groups, tuple(outputs)), tuple(inputs), tuple(outputs), initial
    )


def _group(
    spec: OptimSpec,
    index: int,
    group: OptimGroup,
    params: Mapping[str, Slot],
    gradient_dtype: torch.dtype | None,
) -> _Group:
    algorithm = of_name(spec.algorithm)
    weights = []
    for param in (params[path] for path in group.params if path in params):
        moments = tuple(
            (m, slots.moment(m.name, param, m.dtype))
            for m in algorithm.moments(spec, group, param.dtype)
        )
        weights.append(_Weight(param, slots.gradient(param, gradient_dtype), moments))
    constants = {**_numbers(spec.settings), **_numbers(group.settings)}
    variables = [slots.hyper(name) for name in spec.variables]
    variables += [slots.hyper(name, index) for name in group.variables]
    counts = bool(weights) and algorithm.counts(spec, group)
    return _Group(algorithm, group, constants, tuple(variables), tuple(weights), counts)


def _numbers(settings: tuple[tuple[str, object], ...]) -> dict[str, float]:
    return {name: value for name, value in settings if isinstance(value, int | float)}


def _function(
    spec: OptimSpec, groups: Sequence[_Group], outputs: tuple[Slot, ...]
) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def update(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counters = [slot for slot in outputs if slot in (slots.STEP, slots.ROUNDING)]
        results = {slot.key: tensors[slot.key] + 1 for slot in counters}
        store = Stores(tensors.get(slots.ROUNDING.key))
        clip = _clip_factor(spec, groups, tensors)
        for group in groups:
            if group.weights:
                _update_group(spec, group, clip, store, tensors, results)
        return results

    return update


def _update_group(
    spec: OptimSpec,
    group: _Group,
    clip: Scalar,
    store: Stores,
    tensors: Mapping[str, torch.Tensor],
    results: dict[str, torch.Tensor],
) -> None:
    hyper: dict[str, Scalar] = dict(group.constants)
    hyper |= {slot.name: tensors[slot.key] for slot in group.variables}
    count = results[slots.STEP.key] if group.counts else None
    values = materialised(group.algorithm.prepare(spec, group.group, hyper, count))
    factor = -clip if group.group.setting("maximize") else clip
    for weight in group.weights:
        dtype = weight.compute_dtype
        gradient = tensors[weight.gradient.key].to(dtype)
        if not is_constant(factor, 1):
            gradient = gradient * factor
        state = {m.name: tensors[slot.key].to(dtype) for m, slot in weight.moments}
        updated, state = group.algorithm.step(
            tensors[weight.slot.key].to(dtype), gradient, state, values
        )
        results[weight.slot.key] = store(updated, weight.slot.dtype)
        for moment, slot in weight.moments:
            results[slot.key] = store(state[moment.name], slot.dtype)


def _clip_factor(
    spec: OptimSpec, groups: Sequence[_Group], tensors: Mapping[str, torch.Tensor]
) -> Scalar:
    """Return what scales all gradients so that their global norm stays within the limit."""
    limit = dict(spec.settings).get("max_grad_norm", math.inf)
    assert isinstance(limit, float)
    weights = [weight for group in groups for weight in group.weights]
    if limit == math.inf or not weights:
        return 1.0
    gradients = [tensors[w.gradient.key].to(w.compute_dtype) for w in weights]
    norm = torch.sqrt(torch.stack([(each * each).sum() for each in gradients]).sum())
    return (limit / norm.clamp(min=max(limit, _TINY))).as_strided((), ())
