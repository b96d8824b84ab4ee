"""OptimSpec and gradients -> the functions that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .reduction import MicroBatches, accumulate, finish, hand_over, scale, take_back
from .step import lower, own_squares
