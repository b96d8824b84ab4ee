"""Describe which tensors of an optimizer's state share memory with each other or with a weight.

``state["b"] = state["a"]`` and ``state["mean"] = state["both"][0]`` make such tensors: a step that
writes to one of them changes the other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

StatePlace = tuple[str, str]  # owner and name
WEIGHT = ""  # as a name: the owner itself, which is a weight


class RootPart(NamedTuple):
    """Elements of a root that follow each other in memory, and how they are arranged."""

    first: int
    shape: tuple[int, ...]
    order: tuple[int, ...]  # its dimensions, from the largest stride on


class StateView(NamedTuple):
    """A tensor that is another one, the root, or a part of it."""

    root: StatePlace
    part: RootPart | None = None  # None if it is the root
    is_scattered: bool = False  # its elements do not follow each other, so it cannot be made

    def of(self, root: Tensor) -> Tensor:
        if self.part is None:
            return root
        first, shape, order = self.part
        flat = root.view(-1).narrow(0, first, math.prod(shape))
        places = sorted(range(len(order)), key=lambda at: order[at])
        return flat.view([shape[at] for at in order]).permute(places)


Views = Mapping[StatePlace, StateView]


def views_among(tensors: Mapping[StatePlace, Tensor]) -> dict[StatePlace, StateView]:
    """Return the tensors that overlap with others. Of equal ones, the first is the root."""
    by_memory: dict[int, list[StatePlace]] = {}
    for place, tensor in tensors.items():
        by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    found: dict[StatePlace, StateView] = {}
    for places in by_memory.values():
        roots: list[StatePlace] = []
        for place in sorted(places, key=lambda place: -tensors[place].numel()):
            views = (_view(root, tensors[root], tensors[place]) for root in roots)
            view = next((each for each in views if each is not None), None)
            if view is None:
                roots.append(place)
            else:
                found[place] = view
    return found


def _view(place: StatePlace, root: Tensor, part: Tensor) -> StateView | None:
    first = int(part.storage_offset() - root.storage_offset())
    if first + _reach(part) <= 0 or first >= _reach(root) or not part.numel():
        return None
    kinds = [(each.shape, each.stride(), each.dtype) for each in (root, part)]
    if kinds[0] == kinds[1]:
        between = 0 < abs(first) < min(part.stride(), default=0)  # columns next to each other
        return None if between else StateView(place, is_scattered=first != 0)
    strides = part.stride()
    order = tuple(sorted(range(part.dim()), key=lambda dim: (-strides[dim], dim)))
    dense = root.is_contiguous() and part.permute(order).is_contiguous()
    inside = root.dtype == part.dtype and first >= 0 and first + _reach(part) <= root.numel()
    if not dense or not inside:
        return StateView(place, is_scattered=True)
    return StateView(place, RootPart(first, tuple(part.shape), order))


def _reach(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one, inclusive."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)
