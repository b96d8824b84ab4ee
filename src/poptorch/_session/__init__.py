"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from .counters import Latency, Stamps
from .hooks import register_post_compile, register_pre_compile
from .proxy import ParameterProxy
from .session import Session
from .wrapping import is_wrapped, owner_of, unwrap, wrap

__all__ = [
    "Latency",
    "ParameterProxy",
    "Session",
    "Stamps",
    "is_wrapped",
    "owner_of",
    "register_post_compile",
    "register_pre_compile",
    "unwrap",
    "wrap",
]
