"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from .hooks import register_post_compile, register_pre_compile
from .progress import CompilationProgress
from .session import Session
from .wrapping import is_wrapped, owner_of, unwrap, wrap

__all__ = [
    "CompilationProgress",
    "Session",
    "is_wrapped",
    "owner_of",
    "register_post_compile",
    "register_pre_compile",
    "unwrap",
    "wrap",
]
