"""Manage the user's optimizer: its compiled form, its values, and its state on the device."""

from .session_optimizer import SessionOptimizer

__all__ = ["SessionOptimizer"]
