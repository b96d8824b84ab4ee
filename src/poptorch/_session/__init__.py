"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from .progress import CompilationProgress
from .session import Session
from .wrapping import is_wrapped, owner_of, unwrap, wrap

__all__ = ["CompilationProgress", "Session", "is_wrapped", "owner_of", "unwrap", "wrap"]
