"""Compare some updates of weights with those that the user's own optimizer makes.

One weight of each parameter group and type is enough, because the same formula updates all others.
Copies of it go through three updates, because state that an optimizer keeps has an effect from the
second one on.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import _update
from .._capture import Request
from .._ir import slots
from .._ir.closeness import Difference, difference
from .._ir.slots import HALF_TYPES, Kind, Slot
from .._ir.spec import OptimSpec
from .traced_update import NotCompared, traced_differences

_UPDATES = 3
# number of roundings that may add up over the updates, because the orders of operations differ
_ROUNDINGS = 64
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, eq=False)
class EagerOptimizer:
    """The user's optimizer, as it was read when the model was wrapped."""

    optimizer: torch.optim.Optimizer  # copies of it are used
    hypers: Mapping[str, float]  # values of the program's variables, by slot key
    names: Mapping[str, str]  # torch's names of state, by those of the program


def update_differences(
    request: Request, spec: OptimSpec, eager: EagerOptimizer
) -> list[Difference]:
    """Return where weights or state differ after some updates.

    Raises:
        NotCompared: they cannot be compared.
    """
    if spec.traced is not None:
        return traced_differences(request, spec, eager.optimizer, eager.hypers)
    found: list[Difference] = []
    compared = True
    for group, slot in _representatives(request, spec):
        tensor = request.tensors[slot.path].tensor
        kept = eager.optimizer.state.get(tensor, {})
        if _has_stepped(kept):  # the program continues with this state
            compared = False
            continue
        given = tensor.detach().to(slot.dtype)
        generator = torch.Generator().manual_seed(0)
        gradients = [
            torch.randn(slot.shape, dtype=slot.dtype, generator=generator) for _ in range(_UPDATES)
        ]
        theirs = _in_eager(eager, group, slot, given.clone(), gradients, kept)
        ours = _by_program(spec, eager, group, slot, given.clone(), gradients)
        differences = _differences(ours, theirs)
        if differences and slot.dtype in HALF_TYPES:
            wide = [gradient.double() for gradient in gradients]
            exact = _in_eager(eager, group, slot, given.double(), wide, _in_double(kept))
            differences = [
                each
                for each in differences
                if not _is_as_exact(ours[each.name], theirs[each.name], exact[each.name])
            ]
        found += differences
    if not (found or compared):
        raise NotCompared("the optimizer has already made steps")
    return found


def _representatives(request: Request, spec: OptimSpec) -> Iterator[tuple[int, Slot]]:
    """Yield the smallest weight of each group and type, with the index of its group."""
    by_path = {slot.path: slot for slot in request.state if slot.path in request.trained}
    for at, group in enumerate(spec.groups):
        smallest: dict[torch.dtype, Slot] = {}
        for slot in sorted((by_path[p] for p in group.params if p in by_path), key=_size):
            if slot.numel:
                smallest.setdefault(slot.dtype, slot)
        yield from ((at, slot) for slot in smallest.values())


def _size(slot: Slot) -> int:
    return slot.numel


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has more state for a weight than its constructor makes."""
    return bool(state) and float(state.get("step", 1)) != 0


def _differences(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """Return where values that both have differ by more than rounding."""
    pairs = ((name, ours[name], theirs[name]) for name in ours if name in theirs)
    return [
        found
        for name, mine, other in pairs
        if (found := difference(name, mine, other, _share(other))) is not None
    ]


def _share(value: torch.Tensor) -> float:
    rounds = value.is_floating_point() or value.is_complex()
    return _ROUNDINGS * torch.finfo(value.dtype).eps if rounds else 0.0


def _is_as_exact(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether each element is as close to the exact value as in eager PyTorch.

    In half precision, squares of small gradients are zero in eager PyTorch, and the quotients of
    Adam are then many times too large. The program divides before it rounds.
    """
    error, allowed = (mine.double() - exact).abs(), (theirs.double() - exact).abs()
    return bool((error <= allowed + _share(theirs) * exact.abs().max()).all())


def _in_double(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value.double() if _is_half(value) else value for name, value in state.items()}


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF_TYPES


def _in_eager(
    eager: EagerOptimizer,
    group: int,
    slot: Slot,
    value: torch.Tensor,
    gradients: list[torch.Tensor],
    kept: Mapping[str, Any],
) -> Mapping[str, torch.Tensor]:
    """Return the weight and its state after steps of the user's optimizer, by description."""
    weight = nn.Parameter(value)
    kind = type(eager.optimizer)
    eager_copy: Any = kind.__new__(kind)
    eager_copy.__dict__.update(vars(eager.optimizer))
    eager_copy.__dict__.pop("step", None)  # a scheduler's wrapper
    eager_copy.__dict__.update({name: OrderedDict() for name in _HOOKS})
    eager_copy.param_groups = [{**eager.optimizer.param_groups[group], "params": [weight]}]
    eager_copy.state = defaultdict(dict)
    if kept:
        eager_copy.state[weight] = copy.deepcopy(dict(kept))
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gradient in gradients:
            weight.grad = gradient.clone()
            eager_copy.step()
    state = ((name, eager_copy.state[weight].get(name)) for name in eager.names.values())
    return {_after_updates(slot): weight.detach()} | {
        _of_weight(name, slot): each for name, each in state if isinstance(each, torch.Tensor)
    }


def _by_program(
    spec: OptimSpec,
    eager: EagerOptimizer,
    group: int,
    slot: Slot,
    value: torch.Tensor,
    gradients: list[torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    """Return the weight and its state after updates of the program, by description."""
    groups = tuple(
        replace(each, params=(slot.path,) if at == group else ())
        for at, each in enumerate(spec.groups)
    )
    # Gradients are clipped by the norm over all weights, so neither side clips here.
    settings = tuple(each for each in spec.settings if each[0] != "max_grad_norm")
    alone = replace(spec, groups=groups, settings=settings, common=())
    lowered = _update.lower(alone, [slot])
    tensors = {
        each.key: torch.full(each.shape, lowered.initial.get(each.key, 0.0), dtype=each.dtype)
        for each in lowered.inputs
    }
    tensors |= {
        each.key: torch.full(each.shape, eager.hypers[each.key], dtype=each.dtype)
        for each in lowered.inputs
        if each.kind is Kind.HYPER
    }
    tensors[slot.key] = value
    with torch.no_grad():
        for gradient in gradients:
            for each in lowered.inputs:
                if each.kind is Kind.GRADIENT:
                    tensors[each.key] = gradient.to(each.dtype)
            tensors |= lowered.function(tensors)
    moments = (
        (theirs, slots.moment(ours, slot, slot.dtype).key) for ours, theirs in eager.names.items()
    )
    return {_after_updates(slot): tensors[slot.key]} | {
        _of_weight(name, slot): tensors[key] for name, key in moments if key in tensors
    }


def _after_updates(weight: Slot) -> str:
    return f"'{weight.path}' after {_UPDATES} updates"


def _of_weight(state: str, weight: Slot) -> str:
    return f"'{state}' of '{weight.path}'"
