"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .cache import differences, flat_fields, store_of
from .passes import PASSES, Draft, passes_text
from .pipeline import Compiled, compile, with_stages
from .shares import shares
from .tiers import Code

__all__ = [
    "PASSES",
    "Code",
    "Compiled",
    "Draft",
    "Share",
    "compile",
    "differences",
    "flat_fields",
    "passes_text",
    "shares",
    "store_of",
    "with_stages",
]
