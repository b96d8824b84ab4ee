"""Run torch's ``_foreach`` functions tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BOUNDS = {"maximum": "min", "clamp_min": "min", "minimum": "max", "clamp_max": "max"}


def one_by_one(
    do: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Do for each tensor what torch's ``_foreach`` functions do for lists."""
    operation = name.removeprefix("_foreach_").rstrip("_")
    listed = dict(kwargs)
    if operation in ("addcmul", "addcdiv") and len(args) == 4:
        args, listed["value"] = args[:3], args[3]
    if "scalars" in listed:
        listed["value"] = listed.pop("scalars")

    def own(value: Any, at: int) -> Any:
        return value[at] if isinstance(value, list | tuple) else value

    return [
        _one(
            do,
            operation,
            name.endswith("_"),
            [own(each, at) for each in args],
            {key: own(each, at) for key, each in listed.items()},
        )
        for at in range(len(args[0]))
    ]


def _one(
    do: Callable[..., Any],
    operation: str,
    in_place: bool,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    if operation == "norm":
        return do(torch.linalg.vector_norm, *args, **named)
    if operation in _BOUNDS:
        bound = args[1] if len(args) > 1 else next(iter(named.values()))
        made = do(Tensor.clamp, args[0], **{_BOUNDS[operation]: bound})
        return do(Tensor.copy_, args[0], made) if in_place else made
    return do(getattr(Tensor, f"{operation}_" if in_place else operation), *args, **named)
