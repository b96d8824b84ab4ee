"""module + example -> micro Graph: trace, loss, backward, buffer updates."""

from .forward import Lanes, Request
from .lanes import NotVectorisable, batch_norm_statistics
from .micro import Micro, capture, narrowed
from .swap import Tied, tensors_of
from .trace import untraced

__all__ = [
    "Lanes",
    "Micro",
    "NotVectorisable",
    "Request",
    "Tied",
    "batch_norm_statistics",
    "capture",
    "narrowed",
    "tensors_of",
    "untraced",
]
