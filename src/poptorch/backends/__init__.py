"""Backends: ways to run a Plan. ``protocol`` is the public seam for others."""

from .protocol import Backend, Builder, Code, Compiled, Executable, Progress
from .registry import AUTO, OPTIMISE, available, checking, choose, interpreted, works_by_stages

__all__ = [
    "AUTO",
    "OPTIMISE",
    "Backend",
    "Builder",
    "Code",
    "Compiled",
    "Executable",
    "Progress",
    "available",
    "checking",
    "choose",
    "interpreted",
    "works_by_stages",
]
