"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from .arguments import CompiledInputs
from .counters import Latency, Stamps
from .files import install, read, save
from .hooks import register_post_compile, register_pre_compile
from .proxy import ParameterProxy
from .session import Session
from .with_loss import with_loss
from .wrapping import is_wrapped, owner_of, resume, suspend, unwrap, wrap

__all__ = [
    "CompiledInputs",
    "Latency",
    "ParameterProxy",
    "Session",
    "Stamps",
    "install",
    "is_wrapped",
    "owner_of",
    "read",
    "register_post_compile",
    "register_pre_compile",
    "resume",
    "save",
    "suspend",
    "unwrap",
    "with_loss",
    "wrap",
]
