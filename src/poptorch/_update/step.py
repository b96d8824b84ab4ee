"""OptimSpec and gradients -> the update: one optimizer step over every trained weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.graph import SlotFunction
from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .._ops.rounding import DROPPED_BITS, rounded
from .formulas import (
    ALGORITHMS,
    SQUARES,
    Algorithm,
    Moment,
    Scalar,
    Scalars,
    Settings,
    Tensors,
    is_constant,
    materialised,
)

_TINY = torch.finfo(torch.float32).tiny
_WORD = 2**32 - 1
_Tensors = Mapping[str, torch.Tensor]
_Step = tuple[torch.Tensor, torch.Tensor, Tensors, Scalars]


def lower(
    spec: OptimSpec,
    params: Sequence[Slot],
    gradient_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
    in_parts: Collection[str] = (),
    norms: Sequence[Slot] = (),
) -> SlotFunction:
    """Return the update as a pure function between slots.

    Args:
        params: the parameters that have a gradient; others, and those in no group, are left alone.
        gradient_dtype: None for that of each parameter.
        stochastic_rounding: round weights and moments that are stored in half at random; the
            function then advances ``rng.rounding``, a 0-d int64 that starts at the seed.
        in_parts: paths of those that are this process's parts of weights. Where norms of the whole
            are needed the function reads the squares that ``own_squares`` makes, added up.
        norms: where the norm of all gradients goes besides, where these are clipped by it.
    """
    groups = _groups_of(spec, params, gradient_dtype)
    squares = _Squares.of(spec, groups, in_parts)
    weights = [weight for group in groups for weight in group.weights]
    outputs: list[Slot] = [slots.STEP] if any(group.counts for group in groups) else []
    initial: dict[str, float] = {}
    for weight in weights:
        outputs += [weight.slot, *(slot for _, slot in weight.moments)]
        initial |= {s.key: m.initial for m, s in weight.moments if m.initial}
    if stochastic_rounding and any(slot.dtype.itemsize == 2 for slot in outputs):
        outputs.append(slots.ROUNDING)
    inputs: list[Slot] = [] if squares is None else [squares.slot]
    inputs += [weight.gradient for weight in weights]
    inputs = [*outputs, *inputs, *_hypers_of(groups)]
    given = tuple(norms) if spec.clips and weights else ()
    function = _function(spec, groups, tuple(outputs), squares, given)
    return SlotFunction("update", function, tuple(inputs), (*outputs, *given), initial)


def _function(
    spec: OptimSpec,
    groups: Sequence[_Group],
    outputs: tuple[Slot, ...],
    squares: _Squares | None,
    norms: tuple[Slot, ...],
) -> Callable[[_Tensors], dict[str, torch.Tensor]]:
    def update(tensors: _Tensors) -> dict[str, torch.Tensor]:
        counters = [slot for slot in outputs if slot in (slots.STEP, slots.ROUNDING)]
        results = {slot.key: tensors[slot.key] + 1 for slot in counters}
        store = RandomRounding(tensors.get(slots.ROUNDING.key))
        norm = _gradient_norm(spec, groups, tensors, squares)
        clip: Scalar = 1.0
        if norm is not None:
            limit = spec.max_grad_norm
            clip = (limit / norm.clamp(min=max(limit, _TINY))).as_strided((), ())
            results |= {slot.key: norm.to(slot.dtype).as_strided((), ()) for slot in norms}
        for group in groups:
            for weight, (value, gradient, state, values) in group.steps(clip, tensors):
                if squares is not None:
                    values = squares.with_those_of(weight, values, tensors)
                updated, state = group.algorithm.step(value, gradient, state, values)
                results[weight.slot.key] = store(updated, weight.slot.dtype)
                for moment, slot in weight.moments:
                    results[slot.key] = store(state[moment.name], slot.dtype)
        return results

    return update


@dataclass(frozen=True)
class _Weight:
    """A weight, or what stands for several or for a part of one."""

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
    settings: Settings
    variables: tuple[Slot, ...]
    weights: tuple[_Weight, ...]  # those that are trained
    counts: bool

    def steps(self, clip: Scalar, tensors: _Tensors) -> Iterator[tuple[_Weight, _Step]]:
        if not self.weights:
            return
        hyper: dict[str, Scalar] = {
            name: value for name, value in self.settings.items() if isinstance(value, int | float)
        }
        hyper |= {slot.name: tensors[slot.key] for slot in self.variables}
        count = tensors[slots.STEP.key] + 1 if self.counts else None
        values = materialised(self.algorithm.prepare(self.settings, hyper, count))
        factor = -clip if self.settings["maximize"] else clip
        for weight in self.weights:
            dtype = weight.compute_dtype
            gradient = tensors[weight.gradient.key].to(dtype)
            if not is_constant(factor, 1):
                gradient = gradient * factor
            state = {m.name: tensors[slot.key].to(dtype) for m, slot in weight.moments}
            yield weight, (tensors[weight.slot.key].to(dtype), gradient, state, values)


def _groups_of(
    spec: OptimSpec, params: Sequence[Slot], gradient_dtype: torch.dtype | None
) -> list[_Group]:
    algorithm = ALGORITHMS[spec.algorithm]
    by_path = {param.path: param for param in params}
    groups = []
    for index, group in enumerate(spec.groups):
        settings = dict((*spec.settings, *group.settings))
        moments = algorithm.moments(settings)
        weights = tuple(
            _Weight(
                param,
                slots.gradient(param, gradient_dtype),
                tuple((m, slots.moment(m.name, param, m.dtype or param.dtype)) for m in moments),
            )
            for param in (by_path[path] for path in group.params if path in by_path)
        )
        variables = [slots.hyper(name) for name in spec.variables]
        variables += [slots.hyper(name, index) for name in group.variables]
        counts = bool(weights) and algorithm.counts(settings)
        groups.append(_Group(algorithm, settings, tuple(variables), weights, counts))
    return groups


def _hypers_of(groups: Sequence[_Group]) -> list[Slot]:
    hypers = {slot.key: slot for group in groups if group.weights for slot in group.variables}
    return [hypers[key] for key in sorted(hypers)]


# Norms of gradients and weights, also where a process has only parts of them: the squares of its
# parts are added up over the processes before the update.


@dataclass(frozen=True)
class _Squares:
    """Which sums of squares an update needs of weights in parts."""

    slot: Slot  # one sum of all gradients if these are clipped, or those of each weight
    places: Mapping[str, int]  # by path, where a weight's begin; none where gradients are clipped
    in_parts: frozenset[str]

    @classmethod
    def of(
        cls, spec: OptimSpec, groups: Sequence[_Group], in_parts: Collection[str]
    ) -> _Squares | None:
        weights = [(g, w) for g in groups for w in g.weights if w.slot.path in in_parts]
        measured = [w.slot.path for group, w in weights if group.algorithm.squares is not None]
        if not weights or not (spec.clips or measured):
            return None
        assert not (spec.clips and measured), "what is clipped by a norm has none of its own"
        count = 1 if spec.clips else len(measured) * SQUARES
        wide = any(weight.compute_dtype == torch.float64 for _, weight in weights)
        slot = slots.squares(count, torch.float64 if wide else torch.float32)
        places = {path: at * SQUARES for at, path in enumerate(measured)}
        return cls(slot, places, frozenset(w.slot.path for _, w in weights))

    def with_those_of(self, weight: _Weight, values: Scalars, tensors: _Tensors) -> Scalars:
        at = self.places.get(weight.slot.path)
        if at is None:
            return values
        own = tensors[self.slot.key][at : at + SQUARES].to(weight.compute_dtype)
        return {**values, **{f"square_{i}": own[i] for i in range(SQUARES)}}


def own_squares(
    spec: OptimSpec,
    params: Sequence[Slot],
    gradient_dtype: torch.dtype | None,
    in_parts: Collection[str],
) -> SlotFunction | None:
    groups = _groups_of(spec, params, gradient_dtype)
    squares = _Squares.of(spec, groups, in_parts)
    if squares is None:
        return None
    made = squares

    def function(tensors: _Tensors) -> dict[str, torch.Tensor]:
        sums: list[torch.Tensor] = []
        if not made.places:
            sums.append(_sum_of_squares(groups, tensors, made.in_parts))
        for group in groups:
            measure = group.algorithm.squares
            if measure is not None:
                for _, step in group.steps(1.0, tensors):
                    sums += measure(*step)
        return {made.slot.key: torch.stack([each.to(made.slot.dtype) for each in sums])}

    weights = [weight for group in groups for weight in group.weights]
    inputs: list[Slot] = [made.slot, *(weight.gradient for weight in weights)]
    if made.places:
        inputs += [s for w in weights for s in (w.slot, *(slot for _, slot in w.moments))]
        inputs += [slots.STEP] if any(group.counts for group in groups) else []
        inputs += _hypers_of(groups)
    return SlotFunction("squares", function, tuple(inputs), (made.slot,))


def _gradient_norm(
    spec: OptimSpec, groups: Sequence[_Group], tensors: _Tensors, squares: _Squares | None
) -> torch.Tensor | None:
    if not spec.clips or not any(group.weights for group in groups):
        return None
    if squares is None:
        square = _sum_of_squares(groups, tensors)
    else:
        here = {w.slot.path for group in groups for w in group.weights} - squares.in_parts
        square = tensors[squares.slot.key][0]
        if here:
            square = square + _sum_of_squares(groups, tensors, here)
    return torch.sqrt(square)


def _sum_of_squares(
    groups: Sequence[_Group], tensors: _Tensors, paths: Collection[str] | None = None
) -> torch.Tensor:
    weights = [
        w for group in groups for w in group.weights if paths is None or w.slot.path in paths
    ]
    gradients = [tensors[w.gradient.key].to(w.compute_dtype) for w in weights]
    return torch.stack([(each * each).sum() for each in gradients]).sum()


class RandomRounding:
    """Stores what an update computed in the type that it is kept in (PopTorch user guide, "Half").

    The random bits are a hash of a counter, ``rng.rounding``, and of the element's place: every
    backend, replica and process draws the same ones. Without a counter it rounds to nearest.
    """

    def __init__(self, counter: torch.Tensor | None) -> None:
        self._counter = counter
        self._drawn = 0

    def __call__(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        counter = self._counter
        if counter is None or value.dtype != torch.float32 or dtype not in DROPPED_BITS:
            return value.to(dtype)
        places = torch.arange(self._drawn, self._drawn + value.numel(), device=counter.device)
        self._drawn += value.numel()
        # Numbers stay below 2**63: words of 32 bits times constants of 30.
        stream = _mixed((counter * 0x9E3779B) & _WORD).as_strided((), ())
        bits = _mixed((places * 0x3C6EF35F + stream) & _WORD) >> (32 - DROPPED_BITS[dtype])
        return rounded(value, dtype, bits.view(value.shape))


def _mixed(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x35A2D97B) & _WORD
    return word ^ (word >> 15)
