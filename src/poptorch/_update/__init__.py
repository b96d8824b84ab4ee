"""Turn an ``OptimSpec`` and gradients into functions that accumulate, descale and update."""

from .algorithms import compute_dtype
from .bundles import flatten, gather, spread
from .clipping import Anchor
from .own_bundles import alike, over_bundles
from .own_discovery import discover
from .reduction import Accumulation
from .step import lower, own_squares
