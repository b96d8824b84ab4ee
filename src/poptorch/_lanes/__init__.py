"""The graph of one micro-batch -> that of several side by side, without user code."""

from .batched import NotVectorisable
from .side_by_side import apart, one_by_one, side_by_side
from .validation import differences, validate

__all__ = [
    "NotVectorisable",
    "apart",
    "differences",
    "one_by_one",
    "side_by_side",
    "validate",
]
