"""Compare a captured micro-batch with eager PyTorch, on the user's first batch."""

from .micro_batch_check import Check, Mismatch, Skipped
from .optimizer_text import text_of
from .traced_update import NotCompared
from .update_check import EagerOptimizer, update_differences

__all__ = [
    "Check",
    "EagerOptimizer",
    "Mismatch",
    "NotCompared",
    "Skipped",
    "text_of",
    "update_differences",
]
