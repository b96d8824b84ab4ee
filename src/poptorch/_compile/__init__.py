"""The spine: capture, build, place, schedule, compile."""

from .pipeline import Compiled, compile
from .staged import with_stages

__all__ = ["Compiled", "compile", "with_stages"]
