"""Backends: ways to run a Plan. ``protocol`` is the public seam for others."""

from .protocol import Backend, Builder, Code, Compiled, Executable, Progress
from .registry import AUTO, available, checking, choose, works_by_stages

__all__ = [
    "AUTO",
    "Backend",
    "Builder",
    "Code",
    "Compiled",
    "Executable",
    "Progress",
    "available",
    "checking",
    "choose",
    "works_by_stages",
]
