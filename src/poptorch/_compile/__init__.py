"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .cache import store_of
from .passes import PASSES, Draft, passes_text
from .pipeline import Compiled, compile, with_stages
from .shares import shares
from .tiers import Code, compile_plan

__all__ = [
    "PASSES",
    "Code",
    "Compiled",
    "Draft",
    "Share",
    "compile",
    "compile_plan",
    "passes_text",
    "shares",
    "store_of",
    "with_stages",
]
