"""module + example -> micro Graph: trace, loss, backward, buffer updates."""

from .explain import Explanation, explain
from .forward import Lanes, Request
from .lanes import NotVectorisable, batch_norm_statistics
from .micro import Micro, capture, narrowed
from .swap import Tied, tensors_of
from .trace import untraced

__all__ = [
    "Explanation",
    "Lanes",
    "Micro",
    "NotVectorisable",
    "Request",
    "Tied",
    "batch_norm_statistics",
    "capture",
    "explain",
    "narrowed",
    "tensors_of",
    "untraced",
]
