"""module + example -> micro Graph: trace, loss, backward, buffer updates."""

from .decisions import Decision
from .explain import Explanation, capture, explain, search
from .forward import Call, Request
from .lanes import NotVectorisable, batch_norm_statistics
from .micro import Micro, say_narrowed
from .overwrite import OverwriteContextManager
from .parameter_hooks import hooks_of
from .purity import without_autocast
from .recompute import checkpoints, recomputed, with_fewer_checkpoints
from .sources import forgetting_sources
from .swap import Tied, tensors_of
from .trace import untraced

__all__ = [
    "Call",
    "Decision",
    "Explanation",
    "Micro",
    "NotVectorisable",
    "OverwriteContextManager",
    "Request",
    "Tied",
    "batch_norm_statistics",
    "capture",
    "checkpoints",
    "explain",
    "forgetting_sources",
    "hooks_of",
    "recomputed",
    "say_narrowed",
    "search",
    "tensors_of",
    "untraced",
    "with_fewer_checkpoints",
    "without_autocast",
]
