"""Compare a captured micro-batch with eager PyTorch, on the user's first batch."""

from .check import Check, Finding, Skipped
from .traced_update import NotCompared
from .update import EagerOptimizer, update_differences

__all__ = [
    "Check",
    "EagerOptimizer",
    "Finding",
    "NotCompared",
    "Skipped",
    "update_differences",
]
