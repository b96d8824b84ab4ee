"""Provide ``fps`` and ``nearest``, which choose points of a point cloud."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .._base.errors import InvalidValue
from .._ops.library import define
from . import operand_checks

PointBatch = Sequence[int] | torch.Tensor | None


def fps(
    src: torch.Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False
) -> torch.Tensor:
    """Choose points that are far from each other, segment by segment.

    Each step chooses the point with the largest distance to all chosen ones, and the first of
    equally distant points. No gradient flows to ``src``.

    Args:
        src: points, of shape ``[points, features]``.
        ptr: the index of the first point of each segment, then the number of points.
        ratio: the share of each segment's points, over 0 and up to 1, rounded up to whole points.
        random_start: begin a segment at a random point instead of its first point.

    Returns:
        int32 indices of rows of ``src``.

    Raises:
        poptorch.Error: an argument has another type or is out of range.
    """
    operand_checks.tensor(src, "fps: src must be a torch.tensor")
    title, got = "fps: src must be 2-dimensional", f"shape {tuple(src.shape)}"
    operand_checks.that(src.dim() == 2, title, got, "pass a tensor of shape [points, features]")
    _check_segments(ptr, src.shape[0])
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        operand_checks.refuse(
            "fps: ratio must be a float in (0, 1]",
            repr(ratio),
            "use a fraction of the points, for example ratio=0.5",
        )
    if not isinstance(random_start, bool):
        operand_checks.refuse(
            "fps: random_start must be a bool", repr(random_start), "pass True or False"
        )
    starts = torch.tensor(ptr[:-1], device=src.device)
    if random_start:
        sizes = torch.tensor([end - start for start, end in itertools.pairwise(ptr)])
        starts = starts + (torch.rand(len(sizes), device=src.device) * sizes.to(src.device)).long()
    return _farthest_points(src.detach(), starts, list(ptr), ratio)  # type: ignore[no-any-return]


def _check_segments(ptr: Any, points: int) -> None:
    fits = (
        isinstance(ptr, list)
        and all(isinstance(at, int) for at in ptr)
        and 2 <= len(ptr) <= points + 1
        and (ptr[0], ptr[-1]) == (0, points)
        and all(start < end for start, end in itertools.pairwise(ptr))
    )
    title = "fps: ptr must be a list of segment boundaries"
    remedy = f"pass a list of ascending ints from 0 to {points}"
    operand_checks.that(fits, title, f"{ptr!r} for {points} points", remedy)


def nearest(
    x: torch.Tensor, y: torch.Tensor, batch_x: PointBatch = None, batch_y: PointBatch = None
) -> torch.Tensor:
    """Find the nearest row of ``y`` of the same batch, for each row of ``x``.

    Args:
        x, y: points, of shape ``[points, features]``, or ``[points]`` for one feature.
        batch_x, batch_y: the sorted batch number of each row: a list of ints, a tensor, or None
            for one batch.

    Returns:
        Indices of rows of ``y``, one per row of ``x``.

    Raises:
        poptorch.Error: an argument has another type.
        ValueError: shapes do not fit, or a batch is unsorted or occurs on one side only.
    """
    operand_checks.tensor(x, "nearest: x must be a torch.tensor")
    operand_checks.tensor(y, "nearest: y must be a torch.tensor")
    rows, targets = _points(x, "x"), _points(y, "y")
    if rows.shape[1] != targets.shape[1]:
        _invalid(
            "nearest: x and y must have the same number of features",
            f"{rows.shape} and {targets.shape}",
            "pass points with the same number of features, for example x[:, :3] and y[:, :3]",
        )
    batches = _batch(batch_x, "batch_x", len(rows)), _batch(batch_y, "batch_y", len(targets))
    if not any(isinstance(batch, torch.Tensor) for batch in batches):
        only = sorted(set(batches[0]) ^ set(batches[1]))
        title = "nearest: every batch must occur in both batch_x and batch_y"
        if only:
            _invalid(
                title,
                f"only in one of them: {only}",
                "pass points of every batch in x and in y",
            )
    distances = torch.cdist(rows, targets, compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is not None or batch_y is not None:
        first, second = (torch.as_tensor(batch, device=x.device) for batch in batches)
        distances = distances.masked_fill(first[:, None] != second[None, :], float("inf"))
    return distances.argmin(1)


def _points(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dim() not in (1, 2):
        _invalid(
            f"nearest: {name} must have at most 2 dimensions",
            f"shape {tuple(tensor.shape)}",
            "pass a tensor of shape [points, features] or [points]",
        )
    return tensor.detach().float().reshape(len(tensor), -1)


def _batch(batch: PointBatch, name: str, count: int) -> Sequence[int] | torch.Tensor:
    if batch is None or (isinstance(batch, list) and not batch):
        return [0] * count
    is_ints = isinstance(batch, list) and all(isinstance(b, int) for b in batch)
    if not is_ints and not isinstance(batch, torch.Tensor):
        title = f"nearest: {name} must be a list of ints or a tensor"
        operand_checks.refuse(
            title, repr(batch), "pass one int for each point, or omit the argument"
        )
    if len(batch) != count:
        _invalid(
            f"nearest: {name} must have one entry per row",
            f"{len(batch)} entries for {count} rows",
            "pass the batch number of each point",
        )
    if isinstance(batch, list) and sorted(batch) != batch:
        _invalid(
            f"nearest: {name} must be sorted",
            repr(batch),
            "sort the points by their batch number",
        )
    return batch


def _invalid(title: str, got: str, fix: str) -> None:
    raise InvalidValue(title, got=got, fix=fix)


def _picks(ptr: Sequence[int], ratio: float) -> list[int]:
    return [math.ceil((end - start) * ratio) for start, end in itertools.pairwise(ptr)]


def _sample(
    src: torch.Tensor, starts: torch.Tensor, ptr: Sequence[int], ratio: float
) -> torch.Tensor:
    points = src.float()
    chosen: list[int] = []
    for segment, count in enumerate(_picks(ptr, ratio)):
        own = points[ptr[segment] : ptr[segment + 1]]
        nearest = torch.full((len(own),), math.inf, device=src.device)
        pick = int(starts[segment]) - ptr[segment]
        for _ in range(count):
            chosen.append(ptr[segment] + pick)
            nearest = torch.minimum(nearest, (own - own[pick]).square().sum(1))
            pick = int(nearest.argmax())  # the lowest index among equals
    return torch.tensor(chosen, dtype=torch.int32, device=src.device)


_farthest_points = define(
    "farthest_points",
    "(Tensor src, Tensor starts, int[] ptr, float ratio) -> Tensor",
    _sample,
    lambda src, _, ptr, ratio: src.new_empty((sum(_picks(ptr, ratio)),), dtype=torch.int32),
)
