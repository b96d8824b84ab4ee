"""OptimSpec and gradients -> the functions that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .own_discovery import discover
from .reduction import Accumulation, hand_over
from .step import lower, own_squares
