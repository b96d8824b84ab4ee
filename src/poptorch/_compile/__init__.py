"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .cache import store_of
from .pipeline import Compiled, compile, with_stages
from .shares import shares
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
