"""Turn an ``OptimSpec`` and gradients into the update: one optimizer step for each trained
weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.graph import SlotFunction
from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .._ir.tensors import TensorsByKey
from .._ops.optimizer_formulas import SQUARES, MomentTensors, Scalar, Scalars, scaled
from .._ops.rounding import DROPPED_BITS, rounded
from .clipping import Anchor, clip_factor, gradients_of, sums_of_squares
from .per_group import (
    ALGORITHMS,
    Algorithm,
    Moment,
    Settings,
    as_real,
    compute_dtype,
    kept_dtype,
    materialised,
)
from .traced_step_function import lower_own

_WORD = 2**32 - 1
_StepArguments = tuple[torch.Tensor, torch.Tensor, MomentTensors, Scalars]


def lower(
    spec: OptimSpec,
    params: Sequence[Slot],
    stochastic_rounding: bool = False,
    in_parts: Collection[str] = (),
    anchors: Sequence[Anchor] = (),
) -> SlotFunction:
    """Return the update as a pure function between slots.

    Args:
        spec: the optimizer.
        params: the parameters that have a gradient. Others, and those in no group, do not change.
        stochastic_rounding: round values that are stored in half types at random. The function
            then advances ``rng.rounding``, a 0-d int64 that starts at the seed.
        in_parts: paths of the parameters that this process has only in part. If norms of whole
            weights are needed, the function reads the squares from ``own_squares``, summed over
            processes.
        anchors: anchors for the norm of all gradients and for gradients of weights.
    """
    if spec.traced is not None:
        return lower_own(spec, params, anchors, stochastic_rounding)
    algorithm = ALGORITHMS[spec.algorithm]
    groups = _groups_of(spec, params)
    weights = [weight for group in groups for weight in group.weights]
    partial = [weight for weight in weights if weight.slot.path in in_parts]
    squares = _squares_slot(spec, partial)
    places = {weight.slot.path: at * SQUARES for at, weight in enumerate(partial)}
    common = _common(spec, [weight.slot for weight in weights])
    anchors = anchors if weights else ()
    gradients = {weight.slot.path: weight.gradient.key for weight in weights}
    outputs: list[Slot] = [slots.STEP] if any(group.counts for group in groups) else []
    outputs += [s for w in weights for s in (w.slot, *(slot for _, slot in w.moments))]
    initial = {s.key: _first(m, s) for w in weights for m, s in w.moments if m.initial}
    if stochastic_rounding and any(slot.dtype.itemsize == 2 for slot in outputs):
        outputs.append(slots.ROUNDING)
    inputs: list[Slot] = [] if squares is None else [squares]
    inputs += [weight.gradient for weight in weights]
    inputs = [*outputs, *inputs, *_hypers_of(groups)]

    def update(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
        counters = [slot for slot in outputs if slot in (slots.STEP, slots.ROUNDING)]
        results = {slot.key: tensors[slot.key] + 1 for slot in counters}
        store = RandomRounding(tensors.get(slots.ROUNDING.key))
        clip: Scalar = 1.0
        tensors = dict(tensors)
        if weights and (spec.clips or anchors):
            whole = (w.gradient.key for w in weights if w.slot.path not in places)
            terms = sums_of_squares(whole, tensors)
            if squares is not None:
                terms.append(tensors[squares.key][0])
            clip, measured = clip_factor(spec, terms, anchors)
            results |= measured | gradients_of(gradients, tensors, anchors)
        for group in groups:
            for weight, (value, gradient, state, values) in group.steps(clip, tensors):
                if squares is not None and not spec.clips and weight.slot.path in places:
                    at = places[weight.slot.path]
                    traced = tensors[squares.key][at : at + SQUARES].to(value.dtype)
                    values = {**values, **{f"square_{i}": traced[i] for i in range(SQUARES)}}
                updated, state = algorithm.step(value, gradient, state, values)
                stored = store(updated, weight.slot.dtype)
                # the next update of the same memory reads this result
                for key in common.get(weight.slot.key, (weight.slot.key,)):
                    results[key] = tensors[key] = stored
                for moment, slot in weight.moments:
                    results[slot.key] = store(state[moment.name], slot.dtype)
        return results

    return SlotFunction(
        "update", update, tuple(inputs), (*outputs, *(each.slot for each in anchors)), initial
    )


@dataclass(frozen=True)
class _Weight:
    """A weight, several weights in a bundle, or a part of a weight."""

    slot: Slot
    gradient: Slot  # in the type in which the update computes
    moments: tuple[tuple[Moment, Slot], ...]


@dataclass(frozen=True)
class _WeightGroup:
    algorithm: Algorithm
    settings: Settings
    variables: tuple[Slot, ...]
    weights: tuple[_Weight, ...]  # the trained weights
    counts: bool
    scalars: torch.dtype

    def steps(
        self, clip: Scalar, tensors: TensorsByKey
    ) -> Iterator[tuple[_Weight, _StepArguments]]:
        if not self.weights:
            return
        hyper: dict[str, Scalar] = {
            name: value for name, value in self.settings.items() if isinstance(value, int | float)
        }
        hyper |= {slot.name: tensors[slot.key] for slot in self.variables}
        count = tensors[slots.STEP.key].to(self.scalars) + 1 if self.counts else None
        values = materialised(self.algorithm.prepare(self.settings, hyper, count))
        factor = -clip if self.settings["maximize"] else clip
        for weight in self.weights:
            dtype = weight.gradient.dtype
            gradient = scaled(as_real(tensors[weight.gradient.key]), factor)
            state = {m.name: as_real(tensors[slot.key].to(dtype)) for m, slot in weight.moments}
            value = as_real(tensors[weight.slot.key].to(dtype))
            yield weight, (value, gradient, state, values)


def _groups_of(spec: OptimSpec, params: Sequence[Slot]) -> list[_WeightGroup]:
    algorithm = ALGORITHMS[spec.algorithm]
    by_path = {param.path: param for param in params}
    groups = []
    for index, group in enumerate(spec.groups):
        settings = dict((*spec.settings, *group.settings))
        scalars = torch.float64 if settings.get("wide") else torch.float32
        moments = algorithm.moments(settings)
        weights = tuple(
            _Weight(
                param,
                slots.gradient(param, compute_dtype(param.dtype)),
                tuple((m, slots.moment(m.name, param, _kept_in(m, param))) for m in moments),
            )
            for param in (by_path[path] for path in group.params if path in by_path)
        )
        variables = [slots.hyper(name) for name in spec.variables]
        variables += [slots.hyper(name, index, scalars) for name in group.variables]
        counts = bool(weights) and algorithm.counts(settings)
        groups.append(_WeightGroup(algorithm, settings, tuple(variables), weights, counts, scalars))
    return groups


def _common(spec: OptimSpec, weights: Sequence[Slot]) -> dict[str, tuple[str, ...]]:
    """Return for each weight the keys of all weights in the same memory, which are updated one
    after another.
    """
    keys = {weight.path: weight.key for weight in weights}
    found = [tuple(keys[path] for path in same if path in keys) for same in spec.common]
    return {key: same for same in found for key in same}


def _kept_in(moment: Moment, weight: Slot) -> torch.dtype:
    named = moment.dtype
    return weight.dtype if named is None else kept_dtype(weight.dtype, named)


def _first(moment: Moment, slot: Slot) -> complex:
    return complex(moment.initial, moment.initial) if slot.dtype.is_complex else moment.initial


def _hypers_of(groups: Sequence[_WeightGroup]) -> list[Slot]:
    hypers = {slot.key: slot for group in groups if group.weights for slot in group.variables}
    return [hypers[key] for key in sorted(hypers)]


# If a process has only parts of weights, the squares for norms are summed over the processes before
# the update.


def _squares_slot(spec: OptimSpec, partial: Sequence[_Weight]) -> Slot | None:
    """Return a slot for the sum of squares of all gradients if these are clipped, else for those of
    each weight.
    """
    measures = ALGORITHMS[spec.algorithm].squares is not None
    if not partial or not (spec.clips or measures):
        return None
    assert not (spec.clips and measures), (
        "algorithms that need norms of weights do not clip by the norm of all gradients"
    )
    wide = any(weight.gradient.dtype.to_real() is torch.float64 for weight in partial)
    count = 1 if spec.clips else len(partial) * SQUARES
    return slots.squares(count, torch.float64 if wide else torch.float32)


def own_squares(spec: OptimSpec, parts: Sequence[Slot]) -> SlotFunction | None:
    """Return the function that computes the squares of a process's parts, if the update
    needs any.
    """
    if spec.traced is not None and not spec.clips:
        return None
    measure = None if spec.traced is not None else ALGORITHMS[spec.algorithm].squares
    groups = _groups_of(spec, parts)
    weights = [weight for group in groups for weight in group.weights]
    squares = _squares_slot(spec, weights)
    if squares is None:
        return None

    def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
        if measure is None:
            keys = (weight.gradient.key for weight in weights)
            sums = [torch.stack(sums_of_squares(keys, tensors)).sum()]
        else:
            steps = (step for group in groups for _, step in group.steps(1.0, tensors))
            sums = [each for step in steps for each in measure(*step)]
        return {squares.key: torch.stack([each.to(squares.dtype) for each in sums])}

    inputs: list[Slot] = [squares, *(weight.gradient for weight in weights)]
    if measure is not None:
        inputs += [s for w in weights for s in (w.slot, *(slot for _, slot in w.moments))]
        inputs += [slots.STEP] if any(group.counts for group in groups) else []
        inputs += _hypers_of(groups)
    return SlotFunction("squares", function, tuple(inputs), (squares,))


class RandomRounding:
    """Stores results of an update in the type of the state (PopTorch user guide, "Half").

    The random bits are a hash of a counter, ``rng.rounding``, and of the element's index, so all
    backends, replicas and processes draw the same bits. Without a counter, it rounds to the nearest
    value.
    """

    def __init__(self, counter: torch.Tensor | None) -> None:
        self._counter = counter
        self._drawn = 0

    def __call__(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        counter = self._counter
        if dtype.is_complex:
            return torch.view_as_complex(value).to(dtype)
        if counter is None or value.dtype != torch.float32 or dtype not in DROPPED_BITS:
            return value.to(dtype)
        places = torch.arange(self._drawn, self._drawn + value.numel(), device=counter.device)
        self._drawn += value.numel()
        # Numbers stay below 2**63, as products of 32-bit words and 30-bit constants.
        stream = _mixed((counter * 0x9E3779B) & _WORD).as_strided((), ())
        bits = _mixed((places * 0x3C6EF35F + stream) & _WORD) >> (32 - DROPPED_BITS[dtype])
        return rounded(value, dtype, bits.view(value.shape))


def _mixed(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x35A2D97B) & _WORD
    return word ^ (word >> 15)
