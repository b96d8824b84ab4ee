"""``recomputationCheckpoint``: values that the backward pass shall not compute again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._base import source
from .._base.errors import InvalidValue
from .._ops import annotate


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Mark tensors to be kept for the backward pass rather than computed again.

    The result equals the argument; outside a wrapped model nothing else happens.
    Source: spec/parallel.md section 4.1.

    Args:
        tensors: one tensor, several, or one list or tuple of tensors.

    Returns:
        The tensor; a tuple of as many tensors; or a container of the same kind.

    Raises:
        ValueError: something is no tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        kept = _checkpoints(tensors[0])
        return kept if isinstance(tensors[0], tuple) else list(kept)
    kept = _checkpoints(tensors)
    return kept[0] if len(kept) == 1 else kept


def _checkpoints(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(_checkpoint(value) for value in values)


def _checkpoint(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidValue(
            "poptorch.recomputationCheckpoint takes tensors only",
            got=f"{value!r}, of type {type(value).__name__}",
            where=source.calling_line(),
        )
    return annotate.checkpoint(value)
