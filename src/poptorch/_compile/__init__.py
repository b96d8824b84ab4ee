"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .cache import store_of
from .pipeline import Compiled, compile
from .shares import shares
from .staged import with_stages
from .tiers import Code, compile_plan

__all__ = [
    "Code",
    "Compiled",
    "Share",
    "compile",
    "compile_plan",
    "shares",
    "store_of",
    "with_stages",
]
