"""Batch norms that average over all batches so far (``momentum=None``) as tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._base.threads import by_thread
from .swap import BATCH_NORMS

_BATCH_NORM_FORWARD = nn.BatchNorm1d.forward  # the one of all dimensions


@contextlib.contextmanager
def cumulative_averages(root: nn.Module) -> Iterator[None]:
    """Within the block the batch norms of a module keep exact averages over all batches."""
    norms = [module for module in root.modules() if isinstance(module, BATCH_NORMS)]
    changed = [norm for norm in norms if _averages(norm)]
    for norm in changed:
        norm.__dict__["forward"] = by_thread(functools.partial(_forward, norm), norm.forward)
    try:
        yield
    finally:
        for norm in changed:
            del norm.__dict__["forward"]


def _averages(norm: nn.Module) -> bool:
    torchs = "forward" not in norm.__dict__ and type(norm).forward is _BATCH_NORM_FORWARD
    return torchs and norm.momentum is None and norm.running_mean is not None


def _forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    if not norm.training:
        return _BATCH_NORM_FORWARD(norm, x)
    norm._check_input_dim(x)
    assert norm.num_batches_tracked is not None
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    # With momentum 1 what is left in place of the running statistics are those of this batch.
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    out = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    share = 1.0 / norm.num_batches_tracked
    for running, new in zip((mean, variance), of_batch, strict=True):
        running.mul_(1.0 - share).add_(new * share)
    return out
