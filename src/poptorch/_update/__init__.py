"""OptimSpec and gradients -> the functions that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .lower import lower
from .reduction import MicroBatches, accumulate, finish, hand_over, scale, take_back

__all__ = [
    "MicroBatches",
    "accumulate",
    "finish",
    "flatten",
    "gather",
    "hand_over",
    "lower",
    "scale",
    "spread",
    "take_back",
]
