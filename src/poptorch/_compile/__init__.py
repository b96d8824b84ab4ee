"""The spine: capture, build, place, schedule, compile."""

from .pipeline import Compiled, compile

__all__ = ["Compiled", "compile"]
