"""Backends: ways to run a Plan. ``protocol`` is the public seam for others."""

from .protocol import Backend, Executable, Progress
from .registry import available, checking, choose, works_by_stages

__all__ = [
    "Backend",
    "Executable",
    "Progress",
    "available",
    "checking",
    "choose",
    "works_by_stages",
]
