"""Turn the graph of one micro-batch into the graph of several side by side, without
running user code.
"""

from .batched import NotVectorisable
from .for_all_sizes import for_all_sizes
from .side_by_side import one_by_one, sequential_exchange, side_by_side
from .validation import differences

__all__ = [
    "NotVectorisable", "differences", "for_all_sizes", "one_by_one", "sequential_exchange",
    "side_by_side",
]  # fmt: skip
