"""Comparison of a captured micro-batch with eager PyTorch, on the user's own first batch."""

from .check import Finding, Skipped, check
from .undoing import PythonState
from .update import EagerOptimizer, update_differences

__all__ = [
    "EagerOptimizer",
    "Finding",
    "PythonState",
    "Skipped",
    "check",
    "update_differences",
]
