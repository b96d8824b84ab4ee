"""Provide the automatic casting of releases 2.1 to 3.0: a context manager and its policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ._base.errors import InvalidType, InvalidValue
from ._ops.autocast import autocast

__all__ = ["Policy", "autocast"]

_HOMES = (torch, torch.nn.functional, torch.Tensor)


@dataclass(frozen=True)
class Policy:
    """List the functions whose operands ``autocast`` casts; for ``Precision.autocastPolicy``.

    An entry is a function (``torch.matmul``), its name, or a layer (``torch.nn.Conv2d``). A layer
    means the function that it calls.

    Attributes:
        fp16: run in half.
        fp32: run in float.
        promote: mixed operands become float.
        demote: mixed operands become half.

    Raises:
        TypeError: a rule is not a list. A string is refused, too.
        ValueError: torch has no such function.
    """

    fp16: Sequence[Any] = ()
    fp32: Sequence[Any] = ()
    promote: Sequence[Any] = ()
    demote: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Replace functions and layers by their names."""
        for rule in fields(self):
            entries = getattr(self, rule.name)
            if isinstance(entries, str) or not isinstance(entries, Sequence):
                raise InvalidType(
                    f"Policy.{rule.name} must be a list",
                    got=repr(entries),
                    fix=(
                        f"for example Policy({rule.name}=[torch.matmul, torch.nn.Conv2d, "
                        "'softmax'])"
                    ),
                )
            object.__setattr__(self, rule.name, [_name(entry) for entry in entries])


def _name(entry: Any) -> str:
    own = entry if isinstance(entry, str) else getattr(entry, "__name__", repr(entry))
    candidates = [own]
    if isinstance(entry, type):  # Conv2d calls conv2d, and BatchNorm2d calls batch_norm
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own).lower()
        candidates = [own.lower(), snake, re.sub(r"\dd$", "", snake), snake.removesuffix("_loss")]
    for candidate in candidates:
        if any(hasattr(home, candidate) for home in _HOMES):
            return candidate
    raise InvalidValue(
        "Policy contains a name that is not a function of torch",
        got=repr(entry),
        fix=(
            "use the function that a layer calls, for example 'layer_norm' or "
            "torch.nn.functional.mse_loss"
        ),
    )
