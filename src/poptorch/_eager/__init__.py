"""Comparison of a captured micro-batch with eager PyTorch, on the user's own first batch."""

from .check import Finding, Skipped, check
from .undoing import PythonState

__all__ = ["Finding", "PythonState", "Skipped", "check"]
