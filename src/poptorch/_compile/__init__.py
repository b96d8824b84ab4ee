"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .code import default_store
from .pipeline import Compiled, compile
from .shares import shares
from .staged import with_stages
from .tiers import compile_plan

__all__ = [
    "Compiled",
    "Share",
    "compile",
    "compile_plan",
    "default_store",
    "shares",
    "with_stages",
]
