"""Lay out weights one after another in flat tensors, called bundles, so that their update takes
only a few operators.

An update of 200 weights is one kernel. It is several times faster than one kernel per weight, and
compiles in a second instead of half a minute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .._ir import slots
from .._ir.bundle import ALIGNMENT, Bundle, in_chunks, laid_out
from .._ir.graph import SlotFunction
from .._ir.slots import Slot
from .._ir.spec import OptimGroup, OptimSpec
from .._ir.tensors import TensorsByKey


def flatten(
    spec: OptimSpec,
    params: Sequence[Slot],
    name: str = "~",
    multiple: int = ALIGNMENT,
    most: float = math.inf,
) -> tuple[OptimSpec, tuple[Bundle, ...]]:
    """Return the optimizer over bundles of ``params``, and the bundles, both for ``lower``.

    Lengths are multiples of ``multiple``. A bundle has at most ``most`` bytes, unless a single
    weight is larger.
    """
    by_path = {param.path: param for param in params}
    bundles: list[Bundle] = []
    groups: list[OptimGroup] = []
    for index, group in enumerate(spec.groups):
        members = [by_path[path] for path in group.params if path in by_path]
        paths = []
        for dtype in dict.fromkeys(slot.dtype for slot in members):
            same = [slot for slot in members if slot.dtype == dtype]
            for number, chunk in enumerate(in_chunks(same, most)):
                paths.append(f"{name}{index}.{str(dtype).removeprefix('torch.')}.{number}")
                laid, end = laid_out(chunk)
                length = -(-end // multiple) * multiple
                bundles.append(Bundle(slots.param(paths[-1], (length,), dtype), laid))
        paths += [path for path in group.params if path not in by_path]
        groups.append(replace(group, params=tuple(paths)))
    return replace(spec, groups=tuple(groups)), tuple(bundles)


def spread(bundles: Sequence[Bundle]) -> SlotFunction:
    weights = tuple(member.slot for bundle in bundles for member in bundle.members)
    strides = {slot.key: torch.empty(slot.shape, device="meta").stride() for slot in weights}

    def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
        return {
            member.slot.key: tensors[bundle.slot.key].as_strided(
                member.slot.shape, strides[member.slot.key], member.offset
            )
            for bundle in bundles
            for member in bundle.members
        }

    return SlotFunction("spread", function, tuple(bundle.slot for bundle in bundles), weights)


def gather(bundles: Sequence[Bundle], gradients: Sequence[Slot]) -> SlotFunction:
    """Join gradients. Those of one bundle have the same type, as its weights do."""
    by_path = {slot.path: slot for slot in gradients}
    given = [[by_path[member.slot.path] for member in bundle.members] for bundle in bundles]
    made = [slots.gradient(b.slot, own[0].dtype) for b, own in zip(bundles, given, strict=True)]

    def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
        pairs = zip(made, bundles, strict=True)
        return {slot.key: _joined(bundle, tensors, slot.dtype) for slot, bundle in pairs}

    return SlotFunction("gather", function, tuple(itertools.chain(*given)), tuple(made))


def _joined(bundle: Bundle, tensors: TensorsByKey, dtype: torch.dtype) -> torch.Tensor:
    ends = [member.offset for member in bundle.members[1:]] + [bundle.slot.numel]
    rests = [e - m.offset - m.slot.numel for m, e in zip(bundle.members, ends, strict=True)]
    padding = torch.zeros(max(ALIGNMENT, *rests), dtype=dtype)
    parts = []
    for member, rest in zip(bundle.members, rests, strict=True):
        parts.append(tensors[slots.gradient(member.slot).key].reshape(-1))
        if rest:
            parts.append(padding[:rest])
    return torch.cat(parts)
