"""The micro-batches of one update, joined into the combined batch that a wrapped model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._base.errors import Error


def joined(batches: Sequence[Any], name: str = "batch") -> Any:
    """Return the micro-batches' tensors one after another, in containers like the first's.

    Args:
        batches: tensors, or mappings, tuples and lists with tensors in them, all alike; what is no
            tensor comes from the first.
        name: what errors call it.

    Raises:
        poptorch.Error: the shapes of two differ.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        shapes = [tuple(value.shape) for value in batches]
        if len(set(shapes)) > 1:
            raise Error(
                "The micro-batches of an update have different shapes",
                got=f"{name}: {', '.join(map(str, shapes))}",
                fix=(
                    "pad to one length, with poptorch.PadToSizes for example",
                    "an accumulation of 1, with options.programs(n)",
                ),
            )
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {key: joined([batch[key] for batch in batches], str(key)) for key in first}
    if isinstance(first, tuple | list):
        parts = [joined(part, f"{name}[{i}]") for i, part in enumerate(zip(*batches, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first
