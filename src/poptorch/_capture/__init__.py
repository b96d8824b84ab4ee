"""module + example -> micro Graph: trace, loss, backward, buffer updates."""

from .micro import Micro, Request, capture, narrowed
from .swap import Tied, tensors_of
from .trace import untraced

__all__ = ["Micro", "Request", "Tied", "capture", "narrowed", "tensors_of", "untraced"]
