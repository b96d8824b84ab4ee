"""Turn an ``OptimSpec`` and gradients into functions that accumulate, descale and update."""

from .bundles import flatten, gather, spread
from .clipping import Anchor
from .per_group import compute_dtype
from .reduction import Accumulation
from .step import lower, own_squares
from .traced_step_bundles import equally_updated, over_bundles
from .traced_step_discovery import discover
