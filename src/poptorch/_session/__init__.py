"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from .arguments import CompiledInputs
from .counters import Latency, Stamps
from .hooks import register_post_compile, register_pre_compile
from .proxy import ParameterProxy
from .session import Session
from .wrapping import is_wrapped, owner_of, resume, suspend, unwrap, wrap

__all__ = [
    "CompiledInputs",
    "Latency",
    "ParameterProxy",
    "Session",
    "Stamps",
    "is_wrapped",
    "owner_of",
    "register_post_compile",
    "register_pre_compile",
    "resume",
    "suspend",
    "unwrap",
    "wrap",
]
