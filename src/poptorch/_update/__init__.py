"""OptimSpec and gradients -> the pieces that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .lower import lower
from .reduction import Tally, accumulate, finish, scale

__all__ = ["Tally", "accumulate", "finish", "flatten", "gather", "lower", "scale", "spread"]
