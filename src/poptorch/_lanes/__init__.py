"""Turn the graph of one micro-batch into the graph of several side by side, without
running user code.
"""

from .batched import NotVectorisable
from .side_by_side import one_by_one, sequential_exchange, side_by_side
from .validation import differences

__all__ = [
    "NotVectorisable", "differences", "one_by_one", "sequential_exchange", "side_by_side",
]  # fmt: skip
