"""Compare a captured micro-batch with eager PyTorch, on the user's first batch."""

from .check import Check, Finding, Skipped
from .update import EagerOptimizer, update_differences

__all__ = [
    "Check",
    "EagerOptimizer",
    "Finding",
    "Skipped",
    "update_differences",
]
