"""Comparison of a captured micro-batch with eager PyTorch, on the user's own first batch."""

from .check import TITLE, Finding, Skipped, check
from .undoing import PythonState

__all__ = ["TITLE", "Finding", "PythonState", "Skipped", "check"]
