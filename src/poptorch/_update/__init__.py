"""OptimSpec and gradients -> the pieces that accumulate, descale and update."""

from .bundles import Bundle, Member, flatten
from .lower import lower
from .reduction import Tally, accumulate, finish, scale

__all__ = ["Bundle", "Member", "Tally", "accumulate", "finish", "flatten", "lower", "scale"]
