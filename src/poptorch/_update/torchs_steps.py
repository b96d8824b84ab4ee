"""Find out about the steps of torch's optimizers from one weight of each kind.

Without lists of tensors (``foreach``), the optimizers of ``torch.optim`` update one weight after
another, with code that sees only the shape and type of the weight, its gradient and its own state.
What a step does to one weight of a kind, it therefore does to all. Classes that users wrote may do
anything, for example count their weights, so their step runs on all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from .._ir.spec import OptimGroup, OptimSpec
from .._ir.traced_step import KeptValue, StepHooks, TracedParam


def examples_of(spec: OptimSpec) -> dict[str, str]:
    """Return for each weight an example that is updated in the same way, which may be itself.

    The result is empty if that is unknown.
    """
    traced = spec.traced
    assert traced is not None
    classes = [each.cls for each in traced.optimizers]
    if any(getattr(torch.optim, cls.__name__, None) is not cls for cls in classes):
        return {}
    if any(each.state or each.hooks != StepHooks() for each in traced.optimizers):
        return {}
    trained = {path for group in spec.groups for path in group.params}
    of_kind: dict[tuple[object, ...], str] = {}
    return {
        param.path: of_kind.setdefault((at, *_kind_of(param)), param.path)
        for at, group in enumerate(traced.groups)
        for param in group.params
        if param.path in trained
    }


def _kind_of(param: TracedParam) -> tuple[object, ...]:
    own = param.path if param.attributes else ""  # torch reads no attributes of users
    return param.shape, param.dtype, param.is_contiguous, param.is_part, own


def with_examples_only(spec: OptimSpec, examples: Mapping[str, str]) -> OptimSpec:
    """Return an optimizer of the examples, and of the weights that are not trained."""
    assert spec.traced is not None
    others = {path for path, example in examples.items() if path != example}

    def own(group: OptimGroup) -> OptimGroup:
        return replace(group, params=tuple(path for path in group.params if path not in others))

    traced = replace(spec.traced, examples=examples).of_examples()
    groups = tuple(map(own, spec.groups))
    return replace(spec, groups=groups, traced=replace(traced, examples={}))


def with_all_weights(found: OptimSpec, all_of: OptimSpec, examples: Mapping[str, str]) -> OptimSpec:
    """Return what was found out about the examples, for all weights of an optimizer."""
    own, whole = found.traced, all_of.traced
    assert own is not None
    assert own.kept is not None
    assert whole is not None
    like: dict[str, list[str]] = {}
    for path, example in examples.items():
        like.setdefault(example, []).append(path)
    traced = replace(
        own,
        groups=whole.groups,
        kept=tuple(_of_owner(k, path) for k in own.kept for path in like.get(k.owner, [k.owner])),
        layouts={path: own.layouts[e] for path, e in examples.items() if e in own.layouts},
        signatures={p: own.signatures[e] for p, e in examples.items() if e in own.signatures},
        examples=examples if len(like) < len(examples) else {},
    )
    groups = tuple(
        replace(group, params=full.params)
        for group, full in zip(found.groups, all_of.groups, strict=True)
    )
    return replace(found, groups=groups, traced=traced)


def _of_owner(kept: KeptValue, owner: str) -> KeptValue:
    slot = replace(kept.slot, weight=owner) if kept.slot.weight else kept.slot
    return replace(kept, slot=slot, owner=owner)
