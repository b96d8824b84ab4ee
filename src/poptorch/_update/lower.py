"""OptimSpec -> the update as a SlotFunction: one optimizer step over every trained weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from .._ir import slots
from .._ir.optim_spec import OptimSpec
from .._ir.slot import Slot
from .._ir.slot_function import SlotFunction
from .grouped import Group, groups_of
from .rounding import Stores
from .squares import Squares, clip_factor, gradient_norm


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
        spec: the optimizer.
        params: the parameters that have a gradient. Those in no group are left alone, and so are
            paths of groups that are not among them.
        gradient_dtype: element type of ``gradient.*``; None for that of each parameter.
        stochastic_rounding: round weights and moments that are stored in half at random; the
            function then advances ``rng.rounding``, a 0-d int64 that starts at the seed.
        in_parts: paths of those that are this process's parts of weights. Where norms of the whole
            are needed the function reads the squares that ``own_squares`` makes, added up.
        norms: where the norm of all gradients goes besides, where these are clipped by it.

    Returns:
        A function from ``param.*``, ``gradient.*``, ``optstate.*`` and ``hyper.*`` (0-d float32) to
        the new ``param.*`` and ``optstate.*``.
    """
    groups = groups_of(spec, params, gradient_dtype)
    squares = Squares.of(spec, groups, in_parts)
    counts = any(group.counts for group in groups)
    inputs: list[Slot] = [] if squares is None else [squares.slot]
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
    given = tuple(norms) if spec.clips and any(group.weights for group in groups) else ()
    function = _function(spec, groups, tuple(outputs), squares, given)
    return SlotFunction("update", function, tuple(inputs), (*outputs, *given), initial)


def _function(
    spec: OptimSpec,
    groups: Sequence[Group],
    outputs: tuple[Slot, ...],
    squares: Squares | None,
    norms: tuple[Slot, ...],
) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def update(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counters = [slot for slot in outputs if slot in (slots.STEP, slots.ROUNDING)]
        results = {slot.key: tensors[slot.key] + 1 for slot in counters}
        store = Stores(tensors.get(slots.ROUNDING.key))
        norm = gradient_norm(spec, groups, tensors, squares)
        clip = clip_factor(spec, norm)
        if norm is not None:
            results |= {slot.key: norm.to(slot.dtype).as_strided((), ()) for slot in norms}
        for group in groups:
            for weight, (value, gradient, state, values) in group.steps(spec, clip, tensors):
                if squares is not None:
                    values = squares.with_those_of(weight, values, tensors)
                updated, state = group.algorithm.step(value, gradient, state, values)
                results[weight.slot.key] = store(updated, weight.slot.dtype)
                for moment, slot in weight.moments:
                    results[slot.key] = store(state[moment.name], slot.dtype)
        return results

    return update
