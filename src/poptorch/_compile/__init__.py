"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .pipeline import Compiled, compile
from .shares import shares
from .staged import with_stages

__all__ = ["Compiled", "Share", "compile", "shares", "with_stages"]
