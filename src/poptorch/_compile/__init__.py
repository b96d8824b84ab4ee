"""The spine: capture, build, place, schedule, compile."""

from .code import default_store
from .pipeline import Compiled, compile
from .staged import with_stages
from .tiers import compile_plan

__all__ = ["Compiled", "compile", "compile_plan", "default_store", "with_stages"]
