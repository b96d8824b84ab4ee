"""Farthest point sampling, one pick after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from .library import define


def picks(ptr: Sequence[int], ratio: float) -> list[int]:
    """How many points each segment gives."""
    return [math.ceil((end - start) * ratio) for start, end in itertools.pairwise(ptr)]


def _sample(
    src: torch.Tensor, starts: torch.Tensor, ptr: Sequence[int], ratio: float
) -> torch.Tensor:
    points = src.float()
    chosen: list[int] = []
    for segment, count in enumerate(picks(ptr, ratio)):
        own = points[ptr[segment] : ptr[segment + 1]]
        nearest = torch.full((len(own),), math.inf, device=src.device)
        pick = int(starts[segment]) - ptr[segment]
        for _ in range(count):
            chosen.append(ptr[segment] + pick)
            nearest = torch.minimum(nearest, (own - own[pick]).square().sum(1))
            pick = int(nearest.argmax())  # the lowest index among equals
    return torch.tensor(chosen, dtype=torch.int32, device=src.device)


def _fake(
    src: torch.Tensor, starts: torch.Tensor, ptr: Sequence[int], ratio: float
) -> torch.Tensor:
    return src.new_empty((sum(picks(ptr, ratio)),), dtype=torch.int32)


farthest_points = define(
    "farthest_points",
    "(Tensor src, Tensor starts, int[] ptr, float ratio) -> Tensor",
    _sample,
    _fake,
)
