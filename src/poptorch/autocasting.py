"""The autocast policy of releases 2.1 to 3.0, kept so that old scripts can build one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Policy:
    """Lists of operators per casting rule. Without effect: see ``Precision.autocastPolicy``.

    Attributes:
        fp16: operators that ran in half.
        fp32: operators that ran in float.
        promote: operators that upcast mixed operands.
        demote: operators that downcast mixed operands.
    """

    fp16: Sequence[Any] = ()
    fp32: Sequence[Any] = ()
    promote: Sequence[Any] = ()
    demote: Sequence[Any] = ()
