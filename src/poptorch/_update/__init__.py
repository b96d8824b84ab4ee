"""OptimSpec and gradients -> the functions that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .lower import lower
from .reduction import MicroBatches, accumulate, finish, scale

__all__ = ["MicroBatches", "accumulate", "finish", "flatten", "gather", "lower", "scale", "spread"]
