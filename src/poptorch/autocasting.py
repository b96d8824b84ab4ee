"""Automatic casting of releases 2.1 to 3.0: a context manager, and the policy that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._ops.autocast import autocast

__all__ = ["Policy", "autocast"]


@dataclass(frozen=True)
class Policy:
    """Which functions ``autocast`` casts the operands of; see ``Precision.autocastPolicy``.

    Each entry is a function of torch (``torch.matmul``), a layer (``torch.nn.Conv2d``) or a name.

    Attributes:
        fp16: run in half.
        fp32: run in float.
        promote: mixed operands become float.
        demote: mixed operands become half.
    """

    fp16: Sequence[Any] = ()
    fp32: Sequence[Any] = ()
    promote: Sequence[Any] = ()
    demote: Sequence[Any] = ()
