"""Decide whether a traced step may run on bundles: only if a step on a bundle equals a step on each
of its weights.

The step is run on a flat tensor in place of the weights of a bundle. The bundle is used only if the
step is shown to compute the same as for each weight.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._ir.bundle import Bundle
from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .._ir.traced_step import (
    Leaf,
    TracedGroup,
    TracedOptimizer,
    TracedParam,
    TracedStep,
    substituted,
)
from .traced_step_discovery import discover


def equally_updated(spec: OptimSpec, weights: Sequence[Slot]) -> list[Slot]:
    """Return the largest set of weights, for each group and type, that are updated in the
    same way.
    """
    traced = spec.traced
    assert traced is not None
    signatures = {(slot.path, slot.dtype): traced.signatures.get(slot.path) for slot in weights}
    chosen: set[str] = set()
    for group in spec.groups:
        for dtype in dict.fromkeys(slot.dtype for slot in weights):
            of_group = {p: signatures[p, dtype] for p in group.params if (p, dtype) in signatures}
            counts = collections.Counter(filter(None, of_group.values()))
            if counts:
                (most, _), *_ = counts.most_common(1)
                chosen |= {path for path, signature in of_group.items() if signature == most}
    return [slot for slot in weights if slot.path in chosen]


def over_bundles(
    spec: OptimSpec, bundles: Sequence[Bundle], narrow: Callable[[torch.dtype], torch.dtype]
) -> OptimSpec | None:
    """Return an optimizer over bundles with its step, or None if the step would compute something
    else.
    """
    traced = spec.traced
    assert traced is not None
    members = {member.slot.path: bundle for bundle in bundles for member in bundle.members}
    made = replace(
        traced,
        groups=tuple(_group(group, members) for group in traced.groups),
        optimizers=tuple(_optimizer(each, members) for each in traced.optimizers),
        numbers=_numbers(traced, members),
        kept=None,
        layouts={},
    )
    found = discover(replace(spec, traced=made), narrow)
    assert found.traced is not None
    same = all(
        found.traced.signatures.get(bundle.slot.path) == traced.signatures[path]
        for path, bundle in members.items()
    )
    same &= found.traced.differs_at_first == traced.differs_at_first
    return found if same and found.groups == spec.groups else None


def _group(group: TracedGroup, members: Mapping[str, Bundle]) -> TracedGroup:
    params: dict[str, TracedParam] = {}
    others = []
    for param in group.params:
        bundle = members.get(param.path)
        if bundle is None:
            others.append(param)
        elif bundle.slot.path not in params:
            slot = bundle.slot
            params[slot.path] = TracedParam(
                slot.path, slot.shape, slot.dtype, param.attributes, name=param.name
            )
    return replace(group, params=(*params.values(), *others))


def _optimizer(optimizer: TracedOptimizer, members: Mapping[str, Bundle]) -> TracedOptimizer:
    state: dict[str, Any] = {}
    for path, entry in optimizer.state.items():
        bundle = members.get(path)
        if bundle is None:
            state[path] = entry
        else:
            shape = next(each.slot.shape for each in bundle.members if each.slot.path == path)
            state.setdefault(bundle.slot.path, _resized(entry, shape, bundle.slot.shape))
    return replace(optimizer, state=state)


def _resized(entry: Any, before: tuple[int, ...], now: tuple[int, ...]) -> Any:
    def leaf(name: str, value: Any) -> Any:
        resizes = isinstance(value, Leaf) and value.shape == before and not value.number
        return replace(value, shape=now) if resizes else value

    return substituted(entry, "", leaf)


def _numbers(traced: TracedStep, members: Mapping[str, Bundle]) -> dict[tuple[str, str], float]:
    numbers: dict[tuple[str, str], float] = {}
    for (owner, name), value in traced.numbers.items():
        numbers.setdefault((members[owner].slot.path if owner in members else owner, name), value)
    return numbers
