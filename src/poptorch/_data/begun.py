"""The loader that was iterated last: a model compiled for its batches should cut them alike.

Where the sizes happen to divide, each call would make another number of updates than was meant, of
larger micro-batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader

from .._base import log
from .._ir.loops import Loops
from .arrangement import Arrangement

_latest: list[tuple[weakref.ref[DataLoader[object]], Arrangement]] = []


def note(loader: DataLoader[object], plan: Arrangement) -> None:
    """Somebody begins to iterate over a loader."""
    _latest[:] = [(weakref.ref(loader), plan)]


def compare(tensors: Sequence[torch.Tensor], loops: Loops) -> None:
    """Warn if a training model takes batches of the loader apart in another way than they are made.

    Args:
        tensors: the batch that the model is compiled for.
        loops: how the model cuts it.
    """
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    for loader, plan in _latest[:]:
        if loader() is None or plan.combined != rows or plan.steps == loops.slices:
            continue
        _latest.clear()
        log.python.warning(
            "The batch of %d samples is that of a DataLoader which makes it of %d micro-batches of "
            "%d, and the model takes it as %d of %d: they have other device iterations, gradient "
            "accumulation or replicas. Make both with the same poptorch.Options",
            rows,
            plan.steps,
            plan.micro,
            loops.slices,
            rows // loops.slices,
        )
